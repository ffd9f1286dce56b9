"""`moco compare` and `moco ablate`: several trainings on the same pictures with the same budget, side by side.

plan  which trainings    cells  carrying each of them out, in a process of its own    table  what came out
job   from the first to the last: plan, cells, table, one page
"""
