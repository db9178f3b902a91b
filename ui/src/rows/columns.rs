//! Rows of a trial as columns, which take a fraction of the memory of rows.

use std::collections::BTreeMap;

use stoker_storage::metrics::{Row, starts_of};

/// Position of superseded rows.
const SUPERSEDED: u32 = u32::MAX;

/// Effective rows of a trial in compact form.
#[derive(Debug, Default)]
pub(crate) struct TrialMetrics {
    /// Batches, epoch from 0, training seconds and attempt of each row, in order.
    pub(crate) at: Vec<Position>,
    /// Values by group and metric, each with the position of its row.
    pub(crate) curves: BTreeMap<(String, String), Vec<(u32, f64)>>,
}

/// Position of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Position {
    pub(crate) batches: u64,
    pub(crate) epoch: u64,
    /// Seconds of training before the row, without the time between attempts.
    pub(crate) seconds: f64,
    pub(crate) attempt: u32,
}

impl TrialMetrics {
    pub(super) fn bytes(&self) -> usize {
        let curves = self.curves.values().map(|curve| 200 + curve.capacity() * 16).sum::<usize>();
        self.at.capacity() * size_of::<Position>() + curves
    }
}

/// Rows of all attempts in the order of the files.
#[derive(Clone, Debug, Default)]
pub(super) struct Columns {
    heads: Vec<Head>,
    groups: BTreeMap<String, Group>,
}

/// A row without its metrics.
#[derive(Clone, Copy, Debug)]
struct Head {
    group: u32,
    attempt: u32,
    batches: u64,
    epoch: u64,
    time: Option<f64>,
}

#[derive(Clone, Debug)]
struct Group {
    /// Number of the group in [`Head`], by its first row.
    number: u32,
    /// Values by metric, each with the index of its head.
    curves: BTreeMap<String, Vec<(u32, f64)>>,
}

impl Columns {
    /// Adds the next row.
    pub(super) fn add(&mut self, row: Row) {
        let Row { group, batches, epoch, attempt, time, metrics } = row;
        let (head, number) = (self.heads.len() as u32, self.groups.len() as u32);
        let new = || Group { number, curves: BTreeMap::new() };
        let group = self.groups.entry(group).or_insert_with(new);
        self.heads.push(Head { group: group.number, attempt, batches, epoch, time });
        for (name, value) in metrics {
            group.curves.entry(name).or_default().push((head, value));
        }
    }

    /// Removes all rows after the first `num`.
    pub(super) fn truncate(&mut self, num: usize) {
        self.heads.truncate(num);
        // Groups without rows stay, because other groups keep their numbers.
        for group in self.groups.values_mut() {
            group.curves.retain(|_, values| {
                values.truncate(values.partition_point(|(head, _)| (*head as usize) < num));
                !values.is_empty()
            });
        }
    }

    /// Returns the size in memory.
    pub(super) fn bytes(&self) -> usize {
        let curves = self.groups.values().flat_map(|group| group.curves.values());
        let curves = curves.map(|values| 200 + values.capacity() * 16).sum::<usize>();
        self.heads.capacity() * size_of::<Head>() + curves
    }

    /// Returns the effective rows, sorted by batches and group: the same as
    /// [`effective`](stoker_storage::metrics::effective). `resumed` lists attempts with the batches
    /// of their checkpoint.
    pub(super) fn effective(self, resumed: &[(u32, u64)]) -> TrialMetrics {
        let Self { mut heads, groups } = self;
        let mut ranks = vec![0; groups.len()];
        for (rank, group) in (0u32..).zip(groups.values()) {
            ranks[group.number as usize] = rank;
        }
        for head in &mut heads {
            head.group = ranks[head.group as usize];
        }
        let (at, positions) = positions(&heads, resumed);
        drop(heads);
        let mut curves = BTreeMap::new();
        for (group, of) in groups {
            for (name, mut values) in of.curves {
                values.retain_mut(|(head, _)| {
                    *head = positions[*head as usize];
                    *head != SUPERSEDED
                });
                values.sort_by_key(|(position, _)| *position);
                // Of several values of one row, the last one is valid.
                values.dedup_by(|later, kept| {
                    let is_same = later.0 == kept.0;
                    if is_same {
                        *kept = *later;
                    }
                    is_same
                });
                values.shrink_to_fit();
                if !values.is_empty() {
                    curves.insert((group.clone(), name), values);
                }
            }
        }
        TrialMetrics { at, curves }
    }
}

/// Returns the effective positions in order, and the index of the position of each head, which is
/// [`SUPERSEDED`] if the row is not in effect.
fn positions(heads: &[Head], resumed: &[(u32, u64)]) -> (Vec<Position>, Vec<u32>) {
    // The least start of all later attempts, by attempt.
    let mut ends = BTreeMap::<u32, u64>::new();
    let mut end = u64::MAX;
    let starts = starts_of(heads.iter().map(|head| (head.attempt, head.batches)), resumed);
    for (attempt, start) in starts.into_iter().rev() {
        ends.insert(attempt, end);
        end = end.min(start);
    }
    let is_kept = |head: &Head| ends.get(&head.attempt).is_some_and(|end| head.batches <= *end);
    let indexes = (0u32..).zip(heads).filter(|(_, head)| is_kept(head)).map(|(index, _)| index);
    let mut order: Vec<u32> = indexes.collect();
    let place = |index: u32| {
        let head = &heads[index as usize];
        (head.batches, head.group)
    };
    let attempt = |index: u32| heads[index as usize].attempt;
    order.sort_by_key(|index| (place(*index), attempt(*index)));
    let mut positions = vec![SUPERSEDED; heads.len()];
    let mut at = Vec::<Position>::new();
    let mut last: Option<(u32, f64)> = None;
    let mut seconds = 0.0;
    for same in order.chunk_by(|one, other| place(*one) == place(*other)) {
        // The latest attempt supersedes the others. Its rows are merged.
        let latest = same.iter().map(|index| attempt(*index)).max();
        let mut merged = same.iter().copied().filter(|index| Some(attempt(*index)) == latest);
        let Some(first) = merged.next() else { continue };
        let Head { batches, epoch, time, attempt, .. } = heads[first as usize];
        if let Some(time) = time {
            // The pause between two attempts does not count.
            if let Some((number, before)) = last
                && number == attempt
            {
                seconds += (time - before).max(0.0);
            }
            last = Some((attempt, time));
        }
        for index in std::iter::once(first).chain(merged) {
            positions[index as usize] = at.len() as u32;
        }
        at.push(Position { batches, epoch, seconds, attempt });
    }
    (at, positions)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use stoker_storage::metrics::{effective, starts};

    use super::*;

    fn columns(rows: &[Row]) -> Columns {
        let mut columns = Columns::default();
        rows.iter().for_each(|row| columns.add(row.clone()));
        columns
    }

    #[test]
    fn time_between_attempts_does_not_count() {
        let row = |attempt: u32, batches: u64, time: f64| {
            let metrics = BTreeMap::from([("loss".to_owned(), 0.5)]);
            let (group, time) = ("training".to_owned(), Some(time));
            Row { group, batches, epoch: 0, attempt, time, metrics }
        };
        let rows = [row(0, 1, 100.0), row(0, 2, 103.0), row(1, 3, 900.0), row(1, 4, 902.0)];
        let metrics = columns(&rows).effective(&[]);
        let seconds: Vec<f64> = metrics.at.iter().map(|at| at.seconds).collect();
        assert_eq!(seconds, [0.0, 3.0, 3.0, 5.0]);
        assert_eq!(metrics.curves[&("training".to_owned(), "loss".to_owned())].len(), 4);
    }

    fn any_row() -> impl Strategy<Value = Row> {
        let named = (0..3usize, 0..100u32).prop_map(|(name, value)| {
            (["accuracy", "loss", "rate"][name].to_owned(), f64::from(value))
        });
        let metrics =
            vec(named, 0..3).prop_map(|named| named.into_iter().collect::<BTreeMap<String, f64>>());
        let of = |(group, batches, epoch, attempt, metrics): (usize, u64, u64, u32, _)| {
            let group = ["validation", "training", "other"][group].to_owned();
            Row { group, batches, epoch, attempt, time: None, metrics }
        };
        (0..3usize, 0..6u64, 0..4u64, 0..4u32, metrics).prop_map(of)
    }

    proptest! {
        #[test]
        fn columns_have_the_effective_rows(
            rows in vec(any_row(), 0..40), resumed in vec((0..5u32, 0..6u64), 0..3),
        ) {
            let metrics = columns(&rows).effective(&resumed);
            let attempts = starts(&rows, &resumed);
            let (mut at, mut curves) = (Vec::new(), BTreeMap::<_, Vec<(u32, f64)>>::new());
            for (position, row) in (0u32..).zip(effective(rows, &attempts)) {
                at.push((row.batches, row.epoch, row.attempt));
                for (name, value) in row.metrics {
                    curves.entry((row.group.clone(), name)).or_default().push((position, value));
                }
            }
            let actual = metrics.at.iter().map(|at| (at.batches, at.epoch, at.attempt));
            prop_assert_eq!(actual.collect::<Vec<_>>(), at);
            prop_assert_eq!(metrics.curves, curves);
        }

        #[test]
        fn truncated_columns_equal_shorter_ones(
            rows in vec(any_row(), 0..40), num in 0..40usize, added in vec(any_row(), 0..20),
        ) {
            let num = num.min(rows.len());
            let mut truncated = columns(&rows);
            truncated.truncate(num);
            added.iter().for_each(|row| truncated.add(row.clone()));
            let expected = columns(&[&rows[..num], &added[..]].concat()).effective(&[]);
            let actual = truncated.effective(&[]);
            prop_assert_eq!(actual.at, expected.at);
            prop_assert_eq!(actual.curves, expected.curves);
        }
    }
}
