"""The command `housekeeping demo`: real servers, sample data, a scheduler, workers and a live view.

Start reading in `command`. `stage` starts the servers and processes; `scenes` lists the sample data of each family.
"""
