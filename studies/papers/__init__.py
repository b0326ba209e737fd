"""Small problems that the papers used, for a CPU.

python -m studies.paper_problems
"""
