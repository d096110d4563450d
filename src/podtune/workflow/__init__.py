"""The stages of a run in their order: prepare, rehearse the export, train, evaluate, export, report."""
