//! The idx format of MNIST: a magic number, the dimensions, then bytes.
//!
//! ```text
//! 0 0 8 D   size of dimension 0 (u32, big-endian) ... size of dimension D-1   u8 values
//! ```

use std::fmt;
use std::io::Read;
use std::path::Path;

use super::{DataError, read};

/// Type code of unsigned bytes, the only element type that image data sets use.
const UNSIGNED_BYTE: u8 = 0x08;

/// An array of unsigned bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Idx {
    /// Size of each dimension.
    pub shape: Vec<usize>,
    /// Values, with the last dimension varying fastest.
    pub values: Vec<u8>,
}

impl fmt::Debug for Idx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idx").field("shape", &self.shape).finish_non_exhaustive()
    }
}

/// Reads an idx file of unsigned bytes with `dimensions` dimensions, plain or gzip.
///
/// # Errors
///
/// Fails if the file cannot be read, has another element type or number of dimensions, or contains
/// fewer or more values than its header declares.
pub fn read(path: impl AsRef<Path>, dimensions: usize) -> Result<Idx, DataError> {
    let path = path.as_ref();
    let file = path.display().to_string();
    let mut reader = read::open(path)?;
    let shape = header(&file, &mut reader, dimensions)?;
    let expected = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    let expected = expected.ok_or_else(|| {
        malformed(&file, "dimensions whose product fits in memory", format!("{shape:?}"))
    })?;
    let mut values = Vec::new();
    // Read one byte more than expected, to detect a longer file without reading all of it.
    reader
        .take(expected as u64 + 1)
        .read_to_end(&mut values)
        .map_err(|source| DataError::read(&file, source))?;
    if values.len() > expected {
        let what = format!("{expected} bytes after the header, for dimensions {shape:?}");
        return Err(malformed(&file, &what, "more".into()));
    }
    if values.len() < expected {
        let what = format!("{expected} bytes after the header, for dimensions {shape:?}");
        return Err(malformed(&file, &what, values.len().to_string()));
    }
    Ok(Idx { shape, values })
}

/// Reads the header and returns the dimensions.
fn header(file: &str, reader: &mut dyn Read, dimensions: usize) -> Result<Vec<usize>, DataError> {
    let mut bytes = Vec::new();
    let expected_len = 4 + 4 * dimensions;
    let mut take = reader.take(expected_len as u64);
    take.read_to_end(&mut bytes).map_err(|source| DataError::read(file, source))?;
    let magic = bytes.get(..4).unwrap_or(&bytes);
    let expected = [0, 0, UNSIGNED_BYTE, dimensions as u8];
    if magic != expected {
        let what =
            format!("an idx file of bytes with {dimensions} dimensions (magic {expected:?})");
        return Err(malformed(file, &what, format!("magic {magic:?}")));
    }
    if bytes.len() < expected_len {
        let what = format!("a header of {expected_len} bytes");
        return Err(malformed(file, &what, format!("{} bytes", bytes.len())));
    }
    let size =
        |bytes: &[u8]| bytes.iter().fold(0usize, |size, byte| size << 8 | usize::from(*byte));
    Ok(bytes[4..].chunks_exact(4).map(size).collect())
}

fn malformed(file: &str, expected: &str, found: String) -> DataError {
    DataError::Malformed {
        file: file.into(),
        position: String::new(),
        expected: expected.into(),
        found,
        remedy: "this is not the expected file, or it is corrupt or truncated: check its name or \
                 fetch it again",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datasets::read::tests::gzip;

    fn check(content: &[u8], expected: Result<&[u8], &str>) {
        for content in [content.to_vec(), gzip(content)] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("images");
            std::fs::write(&path, &content).unwrap();
            match (read(&path, 2), expected) {
                (Ok(idx), Ok(expected)) => {
                    assert_eq!((&idx.shape[..], &idx.values[..]), (&[2, 3][..], expected));
                }
                (Err(error), Err(expected)) => {
                    let text = error.to_string();
                    assert!(text.contains("images") && text.contains(expected), "{text}");
                }
                (got, expected) => panic!("{got:?} is not {expected:?}"),
            }
        }
    }

    fn file(magic: [u8; 4], sizes: [u32; 2], values: &[u8]) -> Vec<u8> {
        [&magic[..], &sizes[0].to_be_bytes(), &sizes[1].to_be_bytes(), values].concat()
    }

    #[test]
    fn dimensions_and_values_are_read() {
        check(&file([0, 0, 8, 2], [2, 3], &[1, 2, 3, 4, 5, 255]), Ok(&[1, 2, 3, 4, 5, 255]));
    }

    #[test]
    fn header_is_verified() {
        let six = [0; 6];
        check(b"", Err("expected an idx file of bytes with 2 dimensions (magic [0, 0, 8, 2])"));
        check(b"<html>", Err("found magic [60, 104, 116, 109]"));
        check(&file([0, 0, 13, 2], [2, 3], &six), Err("found magic [0, 0, 13, 2]"));
        check(&file([0, 0, 8, 3], [2, 3], &six), Err("found magic [0, 0, 8, 3]"));
        check(&[0, 0, 8, 2, 0, 0], Err("expected a header of 12 bytes, found 6 bytes"));
        let short = "expected 6 bytes after the header, for dimensions [2, 3], found 5;";
        check(&file([0, 0, 8, 2], [2, 3], &six[..5]), Err(short));
        check(&file([0, 0, 8, 2], [2, 3], &[0; 9]), Err("found more;"));
        check(&file([0, 0, 8, 2], [u32::MAX; 2], &six), Err("found 6;"));
    }
}
