//! Memory for the contents of a file.

use std::io;
use std::ops::DerefMut;

use bytes::Bytes;
use memmap2::MmapMut;

/// Length from which memory is mapped separately, so that it can use huge pages.
const MAPPED_BYTES_MIN: usize = 16 << 20;

/// Zeroed memory of a fixed length.
///
/// Filling new memory costs a page fault for each page. Many Linux distributions use huge pages
/// (2 MiB on x86-64) only for memory that requests them.
pub(crate) enum Buffer {
    Allocated(Vec<u8>),
    Mapped(MmapMut),
}

impl Buffer {
    /// Returns zeroed memory of `len` bytes.
    ///
    /// # Errors
    ///
    /// Fails if the system refuses memory that is mapped separately.
    pub(crate) fn zeroed(len: usize) -> io::Result<Self> {
        if len < MAPPED_BYTES_MIN {
            return Ok(Self::Allocated(vec![0; len]));
        }
        let mapped = MmapMut::map_anon(len)?;
        // Ignore the error: a kernel without huge pages uses small ones.
        #[cfg(target_os = "linux")]
        let _ = mapped.advise(memmap2::Advice::HugePage);
        Ok(Self::Mapped(mapped))
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Allocated(bytes) => bytes,
            Self::Mapped(bytes) => bytes.deref_mut(),
        }
    }

    /// Returns the memory for reading, without copying it.
    pub(crate) fn freeze(self) -> Bytes {
        match self {
            Self::Allocated(bytes) => bytes.into(),
            Self::Mapped(bytes) => Bytes::from_owner(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_any_length_are_zeroed_and_kept() {
        for len in [0, 1, MAPPED_BYTES_MIN - 1, MAPPED_BYTES_MIN, MAPPED_BYTES_MIN + 5] {
            let mut buffer = Buffer::zeroed(len).unwrap();
            assert_eq!(buffer.bytes_mut().len(), len);
            assert!(buffer.bytes_mut().iter().all(|byte| *byte == 0), "{len} bytes");
            let (address, last) = (buffer.bytes_mut().as_ptr(), len.saturating_sub(1));
            buffer.bytes_mut()[last..].fill(7);
            let bytes = buffer.freeze();
            assert_eq!((bytes.as_ptr(), bytes.len()), (address, len), "{len} bytes");
            assert_eq!(bytes.last(), (len > 0).then_some(&7));
        }
    }
}
