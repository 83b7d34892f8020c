"""The command `housekeeping demo`: real servers, sample data, a scheduler, workers and a live view.

Start reading in `demo`; `scenes` has the sample data of each family.
"""
