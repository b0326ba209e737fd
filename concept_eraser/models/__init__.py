"""The model families behind the interface `base.Model`, one file each.

Only this package imports diffusers and transformers.
"""
