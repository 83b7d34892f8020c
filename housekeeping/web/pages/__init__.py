"""Pages of the dashboard and their forms: one module for each page or family of forms.

Each has a function ``add_…`` that registers its routes; `housekeeping.web.application` calls them.
"""
