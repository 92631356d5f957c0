"""What all tests share."""

import cloudpickle

import tests

# Functions of tests travel to ranks by value: by name, every rank would import the test's module,
# and pytest with it.
cloudpickle.register_pickle_by_value(tests)
