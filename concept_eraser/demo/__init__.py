"""The demo page.

Only page.py imports Gradio. The contents of the tabs are made and tested without it.
"""
