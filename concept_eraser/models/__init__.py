"""One file a model family, all behind the face of `base.Model`; the only importers of diffusers and
transformers.
"""
