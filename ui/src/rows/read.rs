//! Rows of a trial that trains: each read keeps the rows of unchanged objects.

use stoker_storage::metrics::Reader;
use stoker_storage::{ObjectState, StorageError};

use super::columns::Columns;

/// Path of an object, and its state when it was listed.
pub(super) type Listed = (String, ObjectState);

/// Rows of all attempts, and the objects that contain them.
#[derive(Debug, Default)]
pub(super) struct ReadRows {
    pub(super) columns: Columns,
    /// Objects in the order of their rows, each with the number of its rows.
    objects: Vec<(Listed, usize)>,
}

impl ReadRows {
    /// Returns the size in memory.
    pub(super) fn bytes(&self) -> usize {
        let objects = self.objects.iter().map(|((path, _), _)| 200 + path.len()).sum::<usize>();
        objects + self.columns.bytes()
    }

    /// Returns whether these are the rows of `objects`.
    pub(super) fn are_of(&self, objects: &[Listed]) -> bool {
        self.objects.len() == objects.len() && self.num_unchanged(objects) == objects.len()
    }

    /// Returns the number of first objects that have not changed since they were read.
    fn num_unchanged(&self, objects: &[Listed]) -> usize {
        let pairs = self.objects.iter().zip(objects);
        pairs.take_while(|((read, _), object)| read == *object).count()
    }

    /// Reads `objects`, except the first ones if they have not changed since they were read. The
    /// rows are then the same as after a complete read. Returns the number of objects that were
    /// read.
    ///
    /// An object that has grown is read from its beginning, because its first rows may differ too.
    /// Trainers begin another object after 512 KiB.
    ///
    /// # Errors
    ///
    /// The storage failed.
    pub(super) async fn update(
        &mut self,
        reader: &Reader<'_>,
        objects: Vec<Listed>,
    ) -> Result<usize, StorageError> {
        let num_unchanged = self.num_unchanged(&objects);
        self.objects.truncate(num_unchanged);
        self.columns.truncate(self.objects.iter().map(|(_, num_rows)| num_rows).sum());
        let new: Vec<Listed> = objects.into_iter().skip(num_unchanged).collect();
        let paths: Vec<String> = new.iter().map(|(path, _)| path.clone()).collect();
        let num_read = new.len();
        let mut nums = vec![0; num_read];
        let columns = &mut self.columns;
        let add = |index: usize, row| {
            nums[index] += 1;
            columns.add(row);
        };
        reader.each_row(paths, add).await?;
        self.objects.extend(new.into_iter().zip(nums));
        Ok(num_read)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use stoker_storage::Storage;
    use stoker_storage::metrics::{Row, segments};

    use super::*;

    /// Returns a line for each loss after so many batches. The third one is of the validation.
    fn lines(attempt: u32, losses: &[(u64, f64)]) -> String {
        let line = |(batches, loss): &(u64, f64)| {
            let group = if *batches == 3 { "validation" } else { "training" };
            let metrics = BTreeMap::from([("loss".to_owned(), *loss)]);
            let (batches, time) = (*batches, Some(*batches as f64));
            let row = Row { group: group.to_owned(), batches, epoch: 0, attempt, time, metrics };
            format!("{}\n", serde_json::to_string(&row).unwrap())
        };
        losses.iter().map(line).collect()
    }

    #[tokio::test]
    async fn updates_equal_complete_reads() {
        let storage = Storage::open("memory://", None).unwrap();
        let reader = Reader::new(&storage);
        let mut rows = ReadRows::default();
        let cut = |text: String| text[..text.len() - 9].to_owned();
        // Attempt and number of an object, its new contents, and how many objects are read.
        let steps = [
            (0, 0, Some(lines(0, &[(1, 0.5)])), 1),
            (0, 0, Some(cut(lines(0, &[(1, 0.5), (2, 0.4)]))), 1),
            (0, 0, Some(lines(0, &[(1, 0.5), (2, 0.4)])), 1),
            (0, 1, Some(lines(0, &[(3, 0.3), (4, 0.3)])), 1),
            (0, 1, Some(lines(0, &[(3, 0.3)])), 1),
            // Other rows of the same size.
            (0, 0, Some(lines(0, &[(1, 0.7), (2, 0.4)])), 2),
            // Attempts that resume from earlier batches. Their numbers order them.
            (1, 0, Some(lines(1, &[(2, 0.2), (3, 0.1)])), 1),
            (10, 0, Some(lines(10, &[(3, 0.2)])), 1),
            (2, 0, Some(lines(2, &[(3, 0.4), (4, 0.1)])), 2),
            (10, 0, Some(lines(10, &[(3, 0.2), (4, 0.2)])), 1),
            (10, 0, Some(String::new()), 1),
            (0, 1, None, 3),
            (1, 0, Some(lines(1, &[(5, 0.2)])), 3),
        ];
        for (attempt, seq, text, expected) in steps {
            let path = segments("t", attempt).path(seq);
            match text.clone() {
                Some(text) => storage.put(&path, text.into()).await.unwrap(),
                None => storage.delete(&path).await.unwrap(),
            }
            let objects = reader.objects("t").await.unwrap();
            assert!(!rows.are_of(&objects), "{path} {text:?}");
            let num_read = rows.update(&reader, objects.clone()).await.unwrap();
            assert_eq!(num_read, expected, "{path} {text:?}");
            assert!(rows.are_of(&objects), "{path} {text:?}");
            assert_eq!(rows.update(&reader, objects.clone()).await.unwrap(), 0);
            let mut complete = ReadRows::default();
            complete.update(&reader, objects).await.unwrap();
            let of = |rows: &ReadRows| rows.columns.clone().effective(&[(1, 2)]);
            let (actual, all) = (of(&rows), of(&complete));
            assert_eq!((actual.at, actual.curves), (all.at, all.curves), "{path} {text:?}");
        }
    }
}
