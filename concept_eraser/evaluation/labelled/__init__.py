"""Measurements on labelled data: classifiers, CLIP models and VAEs."""
