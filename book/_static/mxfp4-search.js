// Search works where the site is opened as a file, but a file may not read the other pages for their excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
