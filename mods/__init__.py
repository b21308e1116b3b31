"""The mods that come with Roundelay, one file each. They import only `roundelay.network`."""
