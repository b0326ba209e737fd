"""Export of a finished run: file formats, sums of erasures, the model card, the hub."""
