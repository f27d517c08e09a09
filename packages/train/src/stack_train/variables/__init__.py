"""The variables of models: their structure and roles, and how runs store and load them."""
