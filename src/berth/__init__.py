"""berth gives a command its place on a shared accelerator host, and takes all of it back."""

__version__ = "0.1.0"
