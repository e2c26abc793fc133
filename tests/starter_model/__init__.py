"""The script that made the starter model (``node/starter``), kept so that it can be made again."""
