"""The commands of ``roundelay``, by topic. Only click is imported at the top of these modules, so that
every command starts fast."""
