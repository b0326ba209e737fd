"""From the name of a concept to an erasing job: prompts, anchor concept, retain set and suite.

`plan.py` makes the plan. `general.py` writes the prompts for a checkpoint of a user, `bundled.py`
those for the bundled model. `known.py` reads the shipped lists of kinds and known concepts.
"""
