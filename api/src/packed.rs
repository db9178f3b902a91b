//! JSON lines as compact text, for annotations: Kubernetes limits those of an object to 256 KiB.
//!
//! The lines are compressed with gzip and encoded as Base64. Records of trials shrink to about a
//! tenth, because they repeat the same field names.

use std::io::{Read as _, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum size of unpacked lines in bytes.
const BYTES_MAX: u64 = 256 << 20;

/// Packs values one after the other.
#[derive(Debug)]
pub struct Packer(GzEncoder<Vec<u8>>);

impl Default for Packer {
    fn default() -> Self {
        Self(GzEncoder::new(Vec::new(), Compression::default()))
    }
}

impl Packer {
    /// Adds a value.
    ///
    /// # Errors
    ///
    /// The value cannot be written as JSON.
    pub fn push(&mut self, value: &impl Serialize) -> serde_json::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        // Complete the block, so that `len` counts the whole line.
        self.0.write_all(&line).and_then(|()| self.0.flush()).map_err(serde_json::Error::io)
    }

    /// Returns the length of the packed text so far, or a few bytes more: at most 20 bytes follow.
    pub fn len(&self) -> usize {
        (self.0.get_ref().len() + 20).div_ceil(3) * 4
    }

    /// Returns `true` if no value was added.
    pub fn is_empty(&self) -> bool {
        self.0.get_ref().len() <= 10
    }

    /// Returns the packed text.
    ///
    /// # Errors
    ///
    /// Never, because the text is written to memory.
    pub fn finish(self) -> serde_json::Result<String> {
        Ok(STANDARD.encode(self.0.finish().map_err(serde_json::Error::io)?))
    }
}

/// Packs one value.
///
/// # Errors
///
/// The value cannot be written as JSON.
///
/// # Examples
///
/// ```
/// let packed = stoker_api::packed::pack(&vec![1, 2])?;
/// assert_eq!(stoker_api::packed::unpack::<Vec<u32>>(&packed)?, [vec![1, 2]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn pack(value: &impl Serialize) -> serde_json::Result<String> {
    let mut packer = Packer::default();
    packer.push(value)?;
    packer.finish()
}

/// Returns the values of a packed text.
///
/// # Errors
///
/// Why the text is not packed JSON of this type.
pub fn unpack<T: DeserializeOwned>(text: &str) -> Result<Vec<T>, String> {
    let failed = |why: String| format!("cannot unpack records: {why}");
    let bytes = STANDARD.decode(text).map_err(|error| failed(error.to_string()))?;
    let mut lines = Vec::new();
    let mut decoder = GzDecoder::new(bytes.as_slice()).take(BYTES_MAX);
    decoder.read_to_end(&mut lines).map_err(|error| failed(error.to_string()))?;
    let values = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    values
        .map(|line| serde_json::from_slice(line).map_err(|error| failed(error.to_string())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_values_round_trip_within_the_announced_length() {
        for num in [0, 1, 2, 100] {
            let mut packer = Packer::default();
            assert!(packer.is_empty());
            let values: Vec<String> = (0..num).map(|i| format!("value {i} of many")).collect();
            values.iter().for_each(|value| packer.push(value).unwrap());
            let announced = packer.len();
            assert_eq!(packer.is_empty(), num == 0);
            let packed = packer.finish().unwrap();
            assert!(packed.len() <= announced, "{} > {announced}", packed.len());
            assert_eq!(unpack::<String>(&packed).unwrap(), values);
        }
    }

    #[test]
    fn corrupt_text_is_an_error() {
        let packed = pack(&"a").unwrap();
        for text in ["?", "AAAA", &packed[..packed.len() - 8]] {
            assert!(unpack::<String>(text).unwrap_err().starts_with("cannot unpack"), "{text}");
        }
        assert!(unpack::<u32>(&packed).is_err());
    }
}
