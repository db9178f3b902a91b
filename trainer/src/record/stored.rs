//! What a file of weights holds: safetensors, and by a feature what torch.save writes.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::DType;
use safetensors::SafeTensors;

use crate::Result;

/// A tensor of a file.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) shape: Vec<usize>,
    /// `Err` is the name of a type that no model has.
    pub(super) dtype: Result<DType, String>,
    /// Row after row.
    pub(super) bytes: Vec<u8>,
}

/// Whether a file is one of torch.save, by how it begins: as a ZIP archive, or as a pickle.
pub(super) fn is_of_torch(bytes: &[u8]) -> bool {
    bytes.starts_with(b"PK\x03\x04") || bytes.first() == Some(&0x80)
}

/// The tensors of a file of safetensors, by name.
pub(super) fn safetensors(bytes: &[u8]) -> Result<BTreeMap<String, Stored>> {
    let tensors = SafeTensors::deserialize(bytes)?.tensors();
    let stored = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = super::exchange::ours(tensor.dtype());
        let dtype = dtype.ok_or_else(|| format!("{:?}", tensor.dtype()));
        let (shape, bytes) = (tensor.shape().to_vec(), tensor.data().to_vec());
        (name, Stored { shape, dtype, bytes })
    };
    Ok(tensors.into_iter().map(stored).collect())
}

/// The tensors of a file of torch.save, by name; with a key, those of the dictionary under it.
#[cfg(feature = "pytorch")]
pub(super) fn torch(path: &Path, key: Option<&str>) -> Result<BTreeMap<String, Stored>> {
    use pytorch_reader::PytorchReader;

    let reader = match key {
        Some(key) => PytorchReader::with_top_level_key(path, key)?,
        None => PytorchReader::new(path)?,
    };
    let mut tensors = BTreeMap::new();
    for (name, tensor) in reader.into_tensors() {
        let (shape, dtype) = (tensor.shape().to_vec(), of_torch(tensor.dtype()));
        let bytes = tensor.read()?;
        tensors.insert(name, Stored { shape, dtype, bytes });
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

/// Says how to read such a file.
#[cfg(not(feature = "pytorch"))]
pub(super) fn torch(_: &Path, _: Option<&str>) -> Result<BTreeMap<String, Stored>> {
    Err("it is a file of torch.save: build with the feature `pytorch` of stoker-trainer, or write it \
         anew in Python, by `from safetensors.torch import save_file` and \
         `save_file(model.state_dict(), \"model.safetensors\")`"
        .into())
}
