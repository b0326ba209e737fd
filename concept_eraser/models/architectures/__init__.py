"""Small networks of the papers' benchmarks, by name, so that a folder of weights can say what it is
the weights of.
"""
