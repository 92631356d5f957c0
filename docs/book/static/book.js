/* A page in a folder may not read another one, so search shows excerpts only where a server has it. */
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
