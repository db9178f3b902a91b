//! Contents of a file in parts.

use bytes::{Bytes, BytesMut};

/// Parts of this size and more are not copied.
const PART_BYTES_MIN: usize = 64 << 10;

/// Contents of a file to save, in parts. Large tensors are parts that share the memory of the
/// model, so a save does not copy them.
#[derive(Clone, Debug, Default)]
pub struct FileParts {
    parts: Vec<Bytes>,
    /// Small parts after the others, joined.
    tail: BytesMut,
    len: usize,
}

impl FileParts {
    /// Adds bytes at the end. Small parts are copied and joined.
    pub fn push(&mut self, bytes: Bytes) {
        self.len += bytes.len();
        if bytes.len() < PART_BYTES_MIN {
            self.tail.extend_from_slice(&bytes);
            return;
        }
        self.finish_tail();
        self.parts.push(bytes);
    }

    /// Adds zeros at the end until the length is `len`.
    pub(crate) fn pad_to(&mut self, len: usize) {
        let num_zeros = len.saturating_sub(self.len);
        self.tail.resize(self.tail.len() + num_zeros, 0);
        self.len += num_zeros;
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` for a file without bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the parts in order.
    pub(crate) fn into_parts(mut self) -> Vec<Bytes> {
        self.finish_tail();
        self.parts
    }

    /// Returns the contents as one buffer. Copies unless the file has a single part.
    pub(crate) fn into_bytes(self) -> Bytes {
        let len = self.len;
        let mut parts = self.into_parts();
        if parts.len() == 1 {
            return parts.remove(0);
        }
        let mut joined = Vec::with_capacity(len);
        parts.iter().for_each(|part| joined.extend_from_slice(part));
        joined.into()
    }

    fn finish_tail(&mut self) {
        if !self.tail.is_empty() {
            self.parts.push(std::mem::take(&mut self.tail).freeze());
        }
    }
}

impl From<Bytes> for FileParts {
    fn from(bytes: Bytes) -> Self {
        Self { len: bytes.len(), parts: vec![bytes], tail: BytesMut::new() }
    }
}

impl From<Vec<u8>> for FileParts {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_in_order() {
        let mut file = FileParts::default();
        let large = Bytes::from(vec![7; PART_BYTES_MIN]);
        file.push(Bytes::from_static(b"ab"));
        file.push(Bytes::from_static(b"c"));
        file.pad_to(5);
        file.pad_to(4);
        file.push(large.clone());
        file.push(Bytes::from_static(b"d"));
        assert_eq!(file.len(), PART_BYTES_MIN + 6);
        let parts = file.clone().into_parts();
        let expected = [Bytes::from_static(b"abc\0\0"), large.clone(), Bytes::from_static(b"d")];
        assert_eq!(parts, expected);
        assert_eq!(parts[1].as_ptr(), large.as_ptr(), "a large part was copied");
        assert_eq!(file.into_bytes(), expected.concat());
        assert!(FileParts::default().into_bytes().is_empty());
    }
}
