//! TensorBoard event files, byte by byte.
//!
//! A file is a row of records: length (u64), masked CRC-32C of the length, the bytes, masked
//! CRC-32C of the bytes, all little-endian. The bytes are a protocol buffer `Event`.

use std::collections::BTreeMap;

/// What an event file begins with.
pub(crate) fn header(time: f64) -> Vec<u8> {
    let mut event = Message::default();
    event.double(1, time);
    event.bytes(3, b"brain.Event:2");
    record(&event.0)
}

/// Says that an attempt begins: readers forget what they have of `step` and later.
pub(crate) fn restart(time: f64, step: u64) -> Vec<u8> {
    let mut log = Message::default();
    log.varint(1, 1);
    let mut event = Message::default();
    event.double(1, time);
    event.varint(2, step);
    event.bytes(7, &log.0);
    record(&event.0)
}

/// The scalars of one group at one step, as `GROUP/NAME`.
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

/// A protocol buffer under construction.
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

/// The sum as these files hold it, so that a sum over bytes with sums is none of them again.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The Castagnoli polynomial, reflected.
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
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4, and the usual check value.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn a_header_is_the_bytes_that_readers_know() {
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
    fn a_large_step_takes_several_bytes() {
        let mut message = Message::default();
        message.varint(2, 300);
        assert_eq!(message.0, [0x10, 0xac, 0x02]);
    }
}
