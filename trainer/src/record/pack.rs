//! burn's file format, written in a canonical order and without copying tensors.

use std::collections::BTreeMap;

use burn::tensor::{Bytes as BurnBytes, DType, Shape};
use bytes::Bytes;
use serde::Serialize;

use super::host::to_bytes;
use crate::Result;
use crate::checkpoint::FileParts;
use crate::rng::mix_seed;

/// A tensor of a file.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) id: Option<u64>,
    pub(super) bytes: Bytes,
}

/// Metadata of a file in burn's format.
#[derive(Serialize)]
struct Metadata<'a> {
    tensors: BTreeMap<&'a str, Descriptor>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    scalars: BTreeMap<String, burn_pack::Scalar>,
}

/// Metadata of a tensor in burn's format.
#[derive(Serialize)]
struct Descriptor {
    dtype: DType,
    shape: Vec<u64>,
    /// Start and end in the data section.
    data_offsets: (u64, u64),
    #[serde(skip_serializing_if = "Option::is_none")]
    param_id: Option<u64>,
}

/// Rewrites burn's bytes with the tensors sorted by name, because burn's optimizers write them in
/// random order. Running statistics keep the random IDs of their construction, which
/// [`initialize`](super::initialize) cannot change and nothing reads. They are replaced by a hash
/// of the name.
pub(crate) fn to_canonical(bytes: BurnBytes) -> Result<FileParts> {
    let reader = burn_pack::Reader::from_bytes(bytes)?;
    let (metadata, scalars) = (reader.metadata().clone(), reader.scalars().clone());
    let mut tensors = vec![];
    for tensor in reader.into_tensors()? {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        tensors.push(Entry { name, dtype, shape, id, bytes: to_bytes(bytes) });
    }
    pack(tensors, &metadata, scalars)
}

/// Encodes in burn's format, sorted by name. burn's writer would copy all tensors into one buffer.
pub(super) fn pack(
    mut tensors: Vec<Entry>,
    metadata: &BTreeMap<String, String>,
    scalars: BTreeMap<String, burn_pack::Scalar>,
) -> Result<FileParts> {
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let num_tensors = tensors.len() as u64;
    let (mut descriptors, mut starts, mut end) = (BTreeMap::new(), vec![], 0);
    for tensor in &tensors {
        let start = u64::next_multiple_of(end, burn_pack::TENSOR_ALIGNMENT);
        end = start + tensor.bytes.len() as u64;
        starts.push(usize::try_from(start)?);
        let param_id =
            tensor.id.map(|id| if id > num_tensors { name_id(&tensor.name) } else { id });
        let shape = tensor.shape.iter().map(|size| *size as u64).collect();
        let data_offsets = (start, end);
        let descriptor = Descriptor { dtype: tensor.dtype, shape, data_offsets, param_id };
        if descriptors.insert(tensor.name.as_str(), descriptor).is_some() {
            return Err(format!("two tensors have the name {}", tensor.name).into());
        }
    }
    let mut encoded = vec![];
    ciborium::into_writer(&Metadata { tensors: descriptors, metadata, scalars }, &mut encoded)
        .map_err(|error| format!("cannot encode the names of tensors: {error}"))?;
    let header = burn_pack::Header::new(u32::try_from(encoded.len())?).into_bytes();
    let data_start = burn_pack::aligned_data_section_start(encoded.len());
    let mut file = FileParts::default();
    file.push(header.to_vec().into());
    file.push(encoded.into());
    file.pad_to(data_start);
    for (tensor, start) in tensors.into_iter().zip(starts) {
        file.pad_to(data_start + start);
        file.push(tensor.bytes);
    }
    Ok(file)
}

/// Returns an ID derived from the name, above all parameter IDs.
fn name_id(name: &str) -> u64 {
    let bytes: Vec<u64> = name.bytes().map(u64::from).collect();
    mix_seed(&bytes) | 1 << 63
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes the same tensors with burn's writer.
    fn expected(
        tensors: &[(&str, Vec<usize>, Option<u64>)],
        metadata: &BTreeMap<String, String>,
        scalars: &BTreeMap<String, burn_pack::Scalar>,
    ) -> Vec<u8> {
        let tensors = tensors.iter().map(|(name, shape, id)| {
            let bytes = BurnBytes::from_bytes_vec(values(name, shape));
            burn_pack::Tensor::new((*name).to_owned(), DType::F32, shape.clone(), *id, bytes)
        });
        let mut writer = burn_pack::Writer::new(tensors.collect());
        for (key, value) in metadata {
            writer = writer.with_metadata(key, value);
        }
        for (key, value) in scalars {
            writer = writer.with_scalar(key, *value);
        }
        writer.into_bytes().unwrap().to_vec()
    }

    fn values(name: &str, shape: &[usize]) -> Vec<u8> {
        vec![name.len() as u8; 4 * shape.iter().product::<usize>()]
    }

    fn check(
        tensors: &[(&str, Vec<usize>, Option<u64>)],
        metadata: &BTreeMap<String, String>,
        scalars: &BTreeMap<String, burn_pack::Scalar>,
    ) {
        let entry = |(name, shape, id): &(&str, Vec<usize>, Option<u64>)| Entry {
            name: (*name).to_owned(),
            dtype: DType::F32,
            shape: Shape::from(shape.clone()),
            id: *id,
            bytes: values(name, shape).into(),
        };
        let entries = tensors.iter().rev().map(entry).collect();
        let packed = pack(entries, metadata, scalars.clone()).unwrap().into_bytes();
        assert!(packed == expected(tensors, metadata, scalars), "{tensors:?}");
    }

    #[test]
    fn files_equal_those_of_burns_writer() {
        let (none, no_scalars) = (BTreeMap::new(), BTreeMap::new());
        check(&[], &none, &no_scalars);
        check(&[("a", vec![3], Some(1))], &none, &no_scalars);
        let several = [
            ("a", vec![300, 70], Some(2)),
            ("b.empty", vec![0, 4], None),
            ("b.weight", vec![2, 3], Some(1)),
            ("c", vec![], Some(4)),
        ];
        check(&several, &none, &no_scalars);
        let metadata = BTreeMap::from([("kind".to_owned(), "adam".to_owned())]);
        let scalars = BTreeMap::from([
            ("beta".to_owned(), burn_pack::Scalar::Float(0.5)),
            ("time".to_owned(), burn_pack::Scalar::UInt(7)),
        ]);
        check(&several, &metadata, &scalars);
    }

    #[test]
    fn two_tensors_of_one_name_are_refused() {
        let entry = || Entry {
            name: "a".to_owned(),
            dtype: DType::F32,
            shape: Shape::from([1]),
            id: None,
            bytes: vec![0; 4].into(),
        };
        let packed = pack(vec![entry(), entry()], &BTreeMap::new(), BTreeMap::new());
        assert_eq!(packed.unwrap_err().to_string(), "two tensors have the name a");
    }
}
