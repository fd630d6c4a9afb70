"""Training methods (recipes), one file each: a recipe determines which roles generate, how their outputs are rewarded,
and when each role is trained.
"""
