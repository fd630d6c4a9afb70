"""Training methods (recipes), one file each: which roles generate, how their outputs are rewarded, and when each role
is trained.
"""
