//! TensorBoard event files.
//!
//! A file is a sequence of records. A record is: length (u64), masked CRC-32C of the length, the
//! bytes, masked CRC-32C of the bytes, all little-endian. The bytes are a protocol buffer `Event`.

pub(crate) mod hparams;
mod image;

use std::collections::BTreeMap;

pub use self::image::Image;

/// Something that is shown in TensorBoard only.
#[derive(Clone, Debug)]
pub(crate) enum Display {
    Histogram(Vec<f32>),
    Image(Image),
    /// Markdown.
    Text(String),
}

impl Display {
    /// Returns an event with this name at one step.
    pub(crate) fn event(&self, time: f64, step: u64, name: &str) -> Vec<u8> {
        match self {
            Self::Histogram(values) => histogram(time, step, name, values),
            Self::Image(image) => summary(time, step, name, 4, &image.message().0, None),
            Self::Text(text) => {
                // A tensor of one string, which the metadata describe as a text.
                let mut tensor = Message::default();
                tensor.varint(1, DT_STRING);
                tensor.bytes(2, &[]);
                tensor.bytes(8, text.as_bytes());
                let mut plugin = Message::default();
                plugin.bytes(1, b"text");
                let mut metadata = Message::default();
                metadata.bytes(1, &plugin.0);
                metadata.varint(4, DATA_CLASS_TENSOR);
                summary(time, step, name, 8, &tensor.0, Some(&metadata.0))
            }
        }
    }
}

/// `DataType::DT_STRING` in TensorFlow's types.proto.
const DT_STRING: u64 = 7;
/// `DataClass::DATA_CLASS_TENSOR` in TensorBoard's summary.proto.
const DATA_CLASS_TENSOR: u64 = 2;

/// Returns the first record of an event file.
pub(crate) fn header(time: f64) -> Vec<u8> {
    let mut event = Message::default();
    event.double(1, time);
    event.bytes(3, b"brain.Event:2");
    record(&event.0)
}

/// Returns a restart event: readers then discard earlier events from `step` on.
pub(crate) fn restart(time: f64, step: u64) -> Vec<u8> {
    let mut log = Message::default();
    log.varint(1, 1);
    let mut event = Message::default();
    event.double(1, time);
    event.varint(2, step);
    event.bytes(7, &log.0);
    record(&event.0)
}

/// Returns the scalars of one group at one step, named `GROUP/NAME`.
pub(crate) fn scalars(
    time: f64,
    step: u64,
    group: &str,
    metrics: &BTreeMap<String, f64>,
) -> Vec<u8> {
    let mut summary = Message::default();
    for (name, value) in metrics {
        let mut scalar = Message::default();
        scalar.bytes(1, format!("{group}/{name}").as_bytes());
        scalar.float(2, *value as f32);
        summary.bytes(1, &scalar.0);
    }
    let mut event = Message::default();
    event.double(1, time);
    event.varint(2, step);
    event.bytes(5, &summary.0);
    record(&event.0)
}

/// Number of bins of a histogram.
const BINS: usize = 64;

/// Returns a histogram of the finite values at one step, with bins of equal width.
fn histogram(time: f64, step: u64, name: &str, values: &[f32]) -> Vec<u8> {
    let finite = || values.iter().map(|value| f64::from(*value)).filter(|value| value.is_finite());
    let (min, max) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), value| {
        (min.min(value), max.max(value))
    });
    let mut counts = [0.0_f64; BINS];
    let width = (max - min) / BINS as f64;
    for value in finite() {
        let bin = if width > 0.0 { ((value - min) / width) as usize } else { 0 };
        counts[bin.min(BINS - 1)] += 1.0;
    }
    let mut histo = Message::default();
    if finite().next().is_some() {
        histo.double(1, min);
        histo.double(2, max);
        histo.double(3, finite().count() as f64);
        histo.double(4, finite().sum());
        histo.double(5, finite().map(|value| value * value).sum());
        let limit = |bin: usize| if bin + 1 == BINS { max } else { min + width * (bin + 1) as f64 };
        let limits: Vec<u8> = (0..BINS).flat_map(|bin| limit(bin).to_le_bytes()).collect();
        let counts: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        histo.bytes(6, &limits);
        histo.bytes(7, &counts);
    }
    summary(time, step, name, 5, &histo.0, None)
}

/// Returns an event with one `Summary.Value`, whose `field` has the content.
fn summary(
    time: f64,
    step: u64,
    name: &str,
    field: u64,
    content: &[u8],
    metadata: Option<&[u8]>,
) -> Vec<u8> {
    let mut value = Message::default();
    value.bytes(1, name.as_bytes());
    value.bytes(field, content);
    if let Some(metadata) = metadata {
        value.bytes(9, metadata);
    }
    let mut summary = Message::default();
    summary.bytes(1, &value.0);
    let mut event = Message::default();
    event.double(1, time);
    event.varint(2, step);
    event.bytes(5, &summary.0);
    record(&event.0)
}

/// A protocol buffer being encoded.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u64, wire: u64) {
        self.raw_varint(field << 3 | wire);
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }
}

fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(bytes.len() + 16);
    record.extend(length);
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(bytes);
    record.extend(masked_crc(bytes).to_le_bytes());
    record
}

/// Masks the CRC, as the format requires: CRCs of data that contains CRCs are unreliable.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected polynomial.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    let step = |crc: u32, byte: &u8| TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8);
    !bytes.iter().fold(!0, step)
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut idx = 0;
    while idx < 256 {
        let mut crc = idx as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[idx] = crc;
        idx += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_the_standard() {
        // Check value of CRC-32C and the examples of RFC 3720, B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn header_has_the_expected_bytes() {
        let bytes = header(0.0);
        assert_eq!(bytes[..8], 24u64.to_le_bytes());
        assert_eq!(&bytes[12..], {
            let mut event = vec![9, 0, 0, 0, 0, 0, 0, 0, 0, 0x1a, 13];
            event.extend(b"brain.Event:2");
            let crc = masked_crc(&event);
            event.extend(crc.to_le_bytes());
            event
        });
    }

    #[test]
    fn large_values_are_multibyte_varints() {
        let mut message = Message::default();
        message.varint(2, 300);
        assert_eq!(message.0, [0x10, 0xac, 0x02]);
    }
}
