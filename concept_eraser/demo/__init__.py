"""The before/after page. Gradio is known to the tabs and page.py only; what they show is made and tested without it."""
