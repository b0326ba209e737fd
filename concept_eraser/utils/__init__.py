"""What every other part uses: errors, limits of numbers, progress, provenance, processes, data
files.
"""
