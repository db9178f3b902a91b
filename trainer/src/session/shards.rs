//! Merging of all ranks' shards into one checkpoint (pure).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use stoker_api::contract::FileEntry;

/// One rank's shard of a checkpoint.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Shard {
    pub(super) files: BTreeMap<String, FileEntry>,
    pub(super) metadata: BTreeMap<String, Value>,
}

/// Shards of all ranks, merged.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct MergedShards {
    /// Rank that stores each file: the first that has it.
    pub(super) owners: BTreeMap<String, usize>,
    pub(super) metadata: BTreeMap<String, Value>,
}

/// Merges all ranks' shards. A file or metadata key that several ranks have must be equal on all of
/// them.
///
/// # Errors
///
/// Returns all conflicts, joined by `; `.
pub(super) fn merge(shards: &[Shard]) -> Result<MergedShards, String> {
    let (mut merged, mut conflicts) = (MergedShards::default(), vec![]);
    for (rank, shard) in shards.iter().enumerate() {
        for (file, entry) in &shard.files {
            let owner = *merged.owners.entry(file.clone()).or_insert(rank);
            let first = &shards[owner].files[file];
            if first != entry {
                conflicts.push(format!(
                    "file {file} is {} on rank {owner} and {} on rank {rank}",
                    describe(first),
                    describe(entry)
                ));
            }
        }
        for (key, value) in &shard.metadata {
            let first = merged.metadata.entry(key.clone()).or_insert_with(|| value.clone());
            if first != value {
                conflicts.push(format!(
                    "metadata {key} is {first} on an earlier rank and {value} on rank {rank}"
                ));
            }
        }
    }
    for file in merged.owners.keys() {
        let mut above = file.as_str();
        while let Some((folder, _)) = above.rsplit_once('/') {
            above = folder;
            if let Some(owner) = merged.owners.get(above) {
                conflicts
                    .push(format!("{above} is a file on rank {owner} and the directory of {file}"));
            }
        }
    }
    match conflicts.is_empty() {
        true => Ok(merged),
        false => Err(conflicts.join("; ")),
    }
}

fn describe(entry: &FileEntry) -> String {
    format!("{} bytes ({:.8})", entry.bytes, entry.hash.hex())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::contract::HashAlgorithm;

    use super::*;

    fn shard(files: &[(&str, &str)], metadata: &Value) -> Shard {
        let entry = |sha256: &str| {
            let hash = HashAlgorithm::Sha256.hash(sha256.to_owned());
            FileEntry { bytes: 3, hash }
        };
        Shard {
            files: files.iter().map(|(file, sum)| ((*file).to_owned(), entry(sum))).collect(),
            metadata: serde_json::from_value(metadata.clone()).unwrap(),
        }
    }

    /// Owner of each file, and the metadata.
    type Expected<'a> = (&'a [(&'a str, usize)], Value);

    #[test]
    fn shards_merge_and_all_conflicts_are_reported() {
        let check = |shards: &[Shard], expected: Result<Expected<'_>, &str>| {
            let merged = merge(shards);
            let expected = expected.map_err(str::to_owned).map(|(owners, metadata)| MergedShards {
                owners: owners.iter().map(|(file, rank)| ((*file).to_owned(), *rank)).collect(),
                metadata: serde_json::from_value(metadata).unwrap(),
            });
            assert_eq!(merged, expected);
        };
        let none = json!({});
        check(&[shard(&[], &none), shard(&[], &none)], Ok((&[], none.clone())));
        let shards = [
            shard(&[("all", "a"), ("rank0/x", "b")], &json!({"epoch": 1, "lead": true})),
            shard(&[("all", "a"), ("rank1/x", "c")], &json!({"epoch": 1})),
        ];
        let owners = [("all", 0), ("rank0/x", 0), ("rank1/x", 1)];
        check(&shards, Ok((&owners, json!({"epoch": 1, "lead": true}))));
        let shards = [
            shard(&[("x", "aaaaaaaaaaaa"), ("y", "b")], &json!({"epoch": 1, "k": [1]})),
            shard(&[("x", "cccccccccccc"), ("y", "b")], &json!({"epoch": 2})),
            shard(&[("x", "aaaaaaaaaaaa"), ("y", "d"), ("y/z", "e")], &json!({"k": [1]})),
        ];
        check(
            &shards,
            Err(
                "file x is 3 bytes (aaaaaaaa) on rank 0 and 3 bytes (cccccccc) on rank 1; metadata \
                 epoch is 1 on an earlier rank and 2 on rank 1; file y is 3 bytes (b) on rank 0 \
                 and 3 bytes (d) on rank 2; y is a file on rank 0 and the directory of y/z",
            ),
        );
    }
}
