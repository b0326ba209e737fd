"""Small networks of published benchmarks, by name, which a folder of weights can refer to."""
