//! Opens plain and gzip files.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::DataError;

/// Magic number of gzip.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Opens a file for reading. Decompresses it if it starts with the magic number of gzip.
pub(super) fn open(path: &Path) -> Result<Box<dyn Read>, DataError> {
    let failed = |source| DataError::read(path.display().to_string(), source);
    let file = File::open(path).map_err(failed)?;
    decompressed(BufReader::new(file)).map_err(failed)
}

/// Reads a complete file, and decompresses it as [`open`] does.
pub(super) fn all(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    open(path)?
        .read_to_end(&mut bytes)
        .map_err(|source| DataError::read(path.display().to_string(), source))?;
    Ok(bytes)
}

fn decompressed(mut reader: impl BufRead + 'static) -> io::Result<Box<dyn Read>> {
    if reader.fill_buf()?.starts_with(&GZIP) {
        return Ok(Box::new(MultiGzDecoder::new(reader)));
    }
    Ok(Box::new(reader))
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// Compresses `bytes` as a gzip file.
    pub(in super::super) fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn check(content: &[u8], expected: Result<&[u8], &str>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, content).unwrap();
        match (all(&path), expected) {
            (Ok(bytes), Ok(expected)) => assert_eq!(bytes, expected),
            (Err(error), Err(expected)) => {
                let text = error.to_string();
                assert!(text.contains(expected) && text.contains("data"), "{text}");
            }
            (got, expected) => panic!("{got:?} is not {expected:?}"),
        }
    }

    #[test]
    fn gzip_is_detected_by_its_first_bytes() {
        let packed = gzip(b"content");
        check(b"content", Ok(b"content"));
        check(b"", Ok(b""));
        check(&packed, Ok(b"content"));
        check(&[&packed[..], &packed].concat(), Ok(b"contentcontent"));
        check(&packed[..packed.len() - 5], Err("fetch it again"));
    }

    #[test]
    fn missing_file_is_reported_with_a_remedy() {
        let text = all(Path::new("/no/such/file")).unwrap_err().to_string();
        assert!(text.contains("cannot read /no/such/file") && text.contains("check the path"));
    }
}
