"""The look of all figures, and the drawings of each lesson.

figures       sizes, colours by role, curves, bars, stacks, lanes, heat maps, sketches of boxes
start_here    drawings shared by lessons: the map, the model, a matrix split in two
timeline      when a rank computes and when it communicates
memory        what a step holds, change by change

The drawings of one lesson are in a file named after its subject: data_parallel, accumulation,
precision, sharded, tensor, context, pipeline, experts, grid, planner (planner_widget: with
sliders), profiling, kernels, failures, prompts, compression, serving.
"""
