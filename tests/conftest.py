"""What all tests share, and their order when two processes run them (`make test`)."""

import cloudpickle
import pytest

import tests

pytest.register_assert_rewrite("tests.labs.lab_tests")  # its asserts say what they compared, too

# Functions of tests travel to ranks by value: by name, every rank would import the test's module,
# and pytest with it.
cloudpickle.register_pickle_by_value(tests)

# These train for a given time on both cores, so they come last, one after the other in one process.
LAST = ("notebooks/00_", "notebooks/01_", "tests/browser/test_browser.py")
LONG = ("notebooks/", "labs/")


def pytest_collection_modifyitems(config, items):
    """What two processes share, the long files first, so that both are done at the same time."""
    shared = hasattr(config, "workerinput")

    def place(item):
        return item.nodeid.startswith(LAST), shared and not item.nodeid.startswith(LONG)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole files to whichever process is free, and what stands in LAST as if it were one file."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "last" if nodeid.startswith(LAST) else nodeid.split("::")[0]

    config.option.loadscopereorder = False  # in the order of collection
    return Files(config, log)
