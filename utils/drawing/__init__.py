"""The look of all figures, and the drawings of each lesson.

figures       sizes, colours by role, curves, bars, stacks, lanes, heat maps, sketches of boxes
start_here    what the lessons share: the map, the model, a matrix in pieces
timeline      when a rank computes and when it talks
memory        what a step holds, from change to change

A drawing of one lesson has its subject's name: data_parallel, accumulation, precision, sharded,
tensor, pipeline, experts, grid, planner (planner_widget: with sliders), profiling, kernels,
prompts, compression, serving.
"""
