"""From a recipe and a loaded model to the eraser that the engine trains; one file a kind of data."""
