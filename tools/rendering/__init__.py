"""Tables and pages of eval/results, from the JSON that studies wrote: python -m tools.render_results"""
