//! CIFAR-10 binary format: records of one label and 3 x 32 x 32 bytes, without a header.

use std::path::Path;

use super::{DataError, Images, read};

/// Channels, height and width of an image.
pub const SHAPE: [usize; 3] = [3, 32, 32];
/// Number of classes; labels are below it.
pub const CLASSES: u8 = 10;
/// Size of a record: the label, then the red, green and blue planes, row by row.
const RECORD_BYTES: usize = 1 + 3 * 32 * 32;

/// Reads CIFAR-10 binary files in order, plain or gzip. A file may contain any number of records,
/// so parts of the official files work too.
///
/// # Errors
///
/// Fails if a file cannot be read, is empty, ends within a record, or has a label above 9.
pub fn read<P: AsRef<Path>>(paths: &[P]) -> Result<Images, DataError> {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for path in paths {
        let path = path.as_ref();
        let bytes = read::all(path)?;
        check(&path.display().to_string(), &bytes)?;
        for record in bytes.chunks_exact(RECORD_BYTES) {
            labels.push(record[0]);
            pixels.extend_from_slice(&record[1..]);
        }
    }
    Images::new(pixels, labels, SHAPE)
}

fn check(file: &str, bytes: &[u8]) -> Result<(), DataError> {
    let malformed = |position: String, expected: String, found: String| DataError::Malformed {
        file: file.into(),
        position,
        expected,
        found,
        remedy: "this reader requires the binary version of CIFAR-10: check the file or fetch it \
                 again",
    };
    if bytes.is_empty() || !bytes.len().is_multiple_of(RECORD_BYTES) {
        let expected = format!("records of {RECORD_BYTES} bytes each, at least one");
        let (records, rest) = (bytes.len() / RECORD_BYTES, bytes.len() % RECORD_BYTES);
        let found = format!("{} bytes ({records} records and {rest} bytes)", bytes.len());
        return Err(malformed(String::new(), expected, found));
    }
    let labels = bytes.iter().step_by(RECORD_BYTES);
    if let Some((record, label)) = labels.enumerate().find(|(_, label)| **label >= CLASSES) {
        let position = format!(", record {record}");
        return Err(malformed(position, format!("a label below {CLASSES}"), label.to_string()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(label: u8, pixel: u8) -> Vec<u8> {
        let mut record = vec![pixel; RECORD_BYTES];
        record[0] = label;
        record
    }

    fn check(files: &[Vec<u8>], expected: Result<&[u8], &str>) {
        let folder = tempfile::tempdir().unwrap();
        let path = |index: usize| folder.path().join(format!("batch_{index}.bin"));
        let paths: Vec<_> = (0..files.len()).map(path).collect();
        paths.iter().zip(files).for_each(|(path, file)| std::fs::write(path, file).unwrap());
        match (read(&paths), expected) {
            (Ok(images), Ok(expected)) => assert_eq!(images.labels(), expected),
            (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            (got, expected) => panic!("{got:?} is not {expected:?}"),
        }
    }

    #[test]
    fn files_are_read_in_order() {
        check(&[[record(3, 1), record(9, 2)].concat(), record(0, 3)], Ok(&[3, 9, 0]));
    }

    #[test]
    fn malformed_files_are_refused() {
        check(&[record(1, 1), vec![]], Err("batch_1.bin: expected records of 3073 bytes each"));
        let cut = [record(1, 1), record(2, 2)[..3000].to_vec()].concat();
        check(&[cut], Err("found 6073 bytes (1 records and 3000 bytes)"));
        let bad = [record(1, 1), record(10, 1)].concat();
        check(&[bad], Err("batch_0.bin, record 1: expected a label below 10, found 10"));
        check(&[], Err("at least one image"));
    }
}
