"""The commands, one small file each; they know no tensor."""
