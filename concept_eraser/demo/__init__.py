"""The before/after page.

Only the tabs and page.py import Gradio. Their contents are made and tested without it.
"""
