"""podtune fine-tunes a model on the cheapest accelerator slice that can do the job, from four lines of YAML."""

__version__ = "0.1.0"
