"""From files to batches: reading, chat templates, masks, packing, records, loading. numpy only."""
