"""`moco compare` and `moco ablate`: several trainings on the same pictures with the same budget, side by side.

plan   which trainings    cells  carrying each of them out    children  those processes, and signals for them
table  what came out      checks  what is looked at before    job  from the first to the last: plan, cells, table, page
"""
