"""Tables and pages of eval/results, from the tables of the studies.

python -m studies.render_results
"""
