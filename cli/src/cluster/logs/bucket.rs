//! The lines that the storage has.

use stoker_api::experiment::Experiment;
use stoker_storage::layout;

use super::tag::Tag;
use crate::cluster::storage;
use crate::failure::Failure;
use crate::print::Output;

/// Prints what an attempt's ranks have stored, rank by rank; returns how many objects there were.
pub(super) async fn print(
    experiment: &Experiment,
    options: &storage::Options,
    tag: &Tag,
    rank: Option<u32>,
    output: Output,
) -> Result<usize, Failure> {
    let spec = &storage::of(experiment);
    let opened = options.open(spec)?;
    let fail = |error| storage::failure(error, spec);
    let folder = layout::logs_path(&storage::trial_path(experiment, tag.trial), tag.attempt);
    let mut found: Vec<(u32, u64, String)> = opened
        .list(&folder)
        .await
        .map_err(fail)?
        .into_iter()
        .filter_map(|path| parse(&path).map(|(rank, seq)| (rank, seq, path)))
        .filter(|it| rank.is_none_or(|rank| it.0 == rank))
        .collect();
    found.sort();
    for (rank, _, path) in &found {
        let bytes = opened.get(path).await.map_err(fail)?;
        let tag = Tag { pod: rank / tag.gang.ranks_per_pod, ..*tag };
        for line in String::from_utf8_lossy(&bytes).lines() {
            // What is stored says its rank by its name alone.
            let line = match tag.gang.world_size > 1 && !line.starts_with("[rank=") {
                true => format!("[rank={rank}] {line}"),
                false => line.to_owned(),
            };
            tag.print(&line, None, output);
        }
    }
    Ok(found.len())
}

/// Rank and number of `.../RANK-SEQ.log`.
fn parse(path: &str) -> Option<(u32, u64)> {
    let name = path.rsplit_once('/')?.1.strip_suffix(".log")?;
    let (rank, seq) = name.split_once('-')?;
    Some((rank.parse().ok()?, seq.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_known_by_rank_and_number() {
        let check = |path: &str, expected: Option<(u32, u64)>| assert_eq!(parse(path), expected);
        check("a/logs/0/3-00000012.log", Some((3, 12)));
        check("a/logs/0/10-00000000.log", Some((10, 0)));
        check("a/logs/0/notes.txt", None);
        check("a/logs/0/x-1.log", None);
    }
}
