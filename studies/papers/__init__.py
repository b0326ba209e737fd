"""The problems that the five papers used themselves, small enough for a CPU: python -m
studies.paper_problems
"""
