//! Readers of weight files: safetensors and, with a feature, files of torch.save.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use burn::tensor::DType;
use safetensors::SafeTensors;

use crate::Result;

/// A tensor in a file.
pub(super) struct StoredTensor {
    pub(super) shape: Vec<usize>,
    /// `Err` contains the name of a type that models do not support.
    pub(super) dtype: Result<DType, String>,
    /// Reads the values, row by row. Deferred until the shape is verified.
    pub(super) read: Box<dyn FnOnce() -> Result<Vec<u8>>>,
}

impl fmt::Debug for StoredTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredTensor")
            .field("shape", &self.shape)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

/// Number of bytes that identify the format of a file.
pub(super) const MAGIC_LEN: usize = 9;

/// Returns `true` if a file of `size` bytes is one of torch.save, given its first [`MAGIC_LEN`]
/// bytes. Such a file begins as a ZIP archive or a pickle. The header length of a safetensors file
/// can begin the same way, but is followed by the header's `{`.
pub(super) fn is_of_torch(head: &[u8], size: u64) -> bool {
    let length = head.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let is_other =
        length.is_some_and(|len| len <= size.saturating_sub(8)) && head.get(8) == Some(&b'{');
    !is_other && (head.starts_with(b"PK\x03\x04") || head.first() == Some(&0x80))
}

/// Returns the tensors of a safetensors file, by name.
pub(super) fn safetensors(bytes: &[u8]) -> Result<BTreeMap<String, StoredTensor>> {
    let tensors = SafeTensors::deserialize(bytes)?.tensors();
    let stored = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = super::weights_file::from_safetensors(tensor.dtype());
        let dtype = dtype.ok_or_else(|| format!("{:?}", tensor.dtype()));
        let (shape, bytes) = (tensor.shape().to_vec(), tensor.data().to_vec());
        (name, StoredTensor { shape, dtype, read: Box::new(|| Ok(bytes)) })
    };
    Ok(tensors.into_iter().map(stored).collect())
}

/// Returns the tensors of a file of torch.save, by name; with a key, those of the dictionary under
/// it.
#[cfg(feature = "pytorch")]
pub(super) fn torch(path: &Path, key: Option<&str>) -> Result<BTreeMap<String, StoredTensor>> {
    use pytorch_reader::PytorchReader;

    let reader = match key {
        Some(key) => PytorchReader::with_top_level_key(path, key)?,
        None => PytorchReader::new(path)?,
    };
    let mut tensors = BTreeMap::new();
    for (name, tensor) in reader.into_tensors() {
        let (shape, dtype) = (tensor.shape().to_vec(), of_torch(tensor.dtype()));
        let read = Box::new(move || Ok(tensor.read()?));
        tensors.insert(name, StoredTensor { shape, dtype, read });
    }
    Ok(tensors)
}

#[cfg(feature = "pytorch")]
fn of_torch(dtype: pytorch_reader::DType) -> Result<DType, String> {
    use pytorch_reader::DType as Theirs;

    Ok(match dtype {
        Theirs::F64 => DType::F64,
        Theirs::F32 => DType::F32,
        Theirs::F16 => DType::F16,
        Theirs::BF16 => DType::BF16,
        Theirs::I64 => DType::I64,
        Theirs::I32 => DType::I32,
        Theirs::U8 => DType::U8,
        Theirs::Bool => DType::Bool(burn::tensor::BoolStore::Native),
        other => return Err(format!("{other:?}")),
    })
}

/// Fails with instructions for reading such a file.
#[cfg(not(feature = "pytorch"))]
pub(super) fn torch(_: &Path, _: Option<&str>) -> Result<BTreeMap<String, StoredTensor>> {
    Err("this is a file of torch.save; enable the feature `pytorch` of stoker-trainer, or convert \
         it in Python: `from safetensors.torch import save_file; \
         save_file(model.state_dict(), \"model.safetensors\")`"
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_is_detected_by_first_bytes() {
        let check = |head: &[u8], size: u64, expected: bool| {
            assert_eq!(is_of_torch(head, size), expected, "{head:?} of {size}");
        };
        check(b"PK\x03\x04\x00\x00\x08\x08\x00", 1 << 20, true);
        check(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9", 1 << 20, true);
        // Header lengths of 128 and of 0x04034b50 bytes.
        check(b"\x80\0\0\0\0\0\0\0{", 1 << 20, false);
        check(b"PK\x03\x04\0\0\0\0{", 1 << 30, false);
        check(b"PK\x03\x04\0\0\0\0{", 1 << 20, true);
        check(b"\x80\x02}q\0.", 6, true);
        check(b"", 0, false);
    }
}
