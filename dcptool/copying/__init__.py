"""How bytes move from a checkpoint into new files, band by band, every CRC32 checked on the way.

A format's writer lays out files as values. Files are copied in groups, each by one thread; of one group, the files that
come to a tensor together share one reading of it:

    OutputFile "a": Literal, Fill w, Closing, …        OutputFile "b": Literal, Fill w, Verbatim, …      outputs
                        │                                                 │
                        └───────────────────────┬─────────────────────────┘
                                   schedule: one order for the group                                     schedule
                                                │
         WriteBytes(a) · WriteBytes(b) · HandOut(band 1 of w) · HandOut(band 2) · … · EndPart(w) · WriteBytes(a) · …
                                                │
                     a few moves are taken from it ahead of the one that is made                         engine
                                                │
      reader threads:  TensorReader.read(band): chunks that the band lies in ─► values ─► cast           reading
                       RecordReader.read(band): bytes of a carried record, as they are
                             │                  │
            every run of     │                  │ band (≤ 8 MiB) in a buffer that is used again
            bytes read       │                  │
                             ▼                  ▼
                       RecordCheck       the group's thread, move by move:
                             │             Band.shares(data) ─► a's share, b's share ─► OpenFile.write   writing
                             │                                  each continues the CRC32 of its file's part
                             │             Closing.make(CRC32s of the parts so far) ─► OpenFile.write
                             ▼                  │
                    EndPart: SourceChecks: whole ─► compared with the stored CRC32; else PartlyRead      checking
                             │                  │
                             ▼                  ▼
                     settle: pieces of all   its sink, finished: synced; nothing under its final name yet
                     who read a part, else          │
                     the record once more           ▼
                             │               publishing: what calls `copy` opens it again, and renames it
                             ▼
              CopyReport.failures: with any of them the output is removed, not published

`copy` (engine) is called by each process of ops/convert and ops/reshard for its share of the files, with `shared`:
who gathers all reports calls `settle`. ops/inspect/stats reads bands with a TensorReader of its own and writes nothing.

Memory is bounded in one place, the engine: W writers hold A moves ahead and the one they make, T threads an array of
stored values before a cast: at most W · (A + 1) + T bands. No move is taken from a schedule before there is room for
it, so that parts, too, are made only as they come up.

outputs     what a file is to be made of, as values
reading     a tensor, or a carried record, in bands
writing     a file that grows, part by part, with the CRC32 of each
schedule    in which order files are made of their parts
checking    what is found out about the source's records on the way
engine      threads that read ahead, one writer per group of files
pool        a function called on threads, a few calls ahead of who takes the results in order
publishing  a place under a temporary name, until the output is complete
"""
