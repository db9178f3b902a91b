//! Weights as others read and write them, with the names and the layout of burn or of PyTorch.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{Bool, DType, Int, Shape, Tensor, TensorData};
use safetensors::{Dtype, View};

use super::stored::{self, Stored};
use super::{pack, to_burn};
use crate::Result;

/// A file of weights in the format safetensors. With the feature `pytorch`, files of `torch.save` can be
/// imported too, of a `state_dict` or a whole model; they are known by how they begin, and
/// always have PyTorch's names and shapes. No code in them is run.
///
/// ```no_run
/// # fn main() -> stoker_trainer::Result<()> {
/// use stoker_trainer::WeightsFile;
/// use stoker_trainer::burn::nn::LinearConfig;
/// use stoker_trainer::burn::tensor::Device;
///
/// let model = LinearConfig::new(4, 2).init(&Device::flex());
/// WeightsFile::new("model.safetensors").pytorch().export(&model)?;
/// let model = WeightsFile::new("model.safetensors").pytorch().import(model)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightsFile {
    path: PathBuf,
    is_pytorch: bool,
    key: Option<String>,
}

impl WeightsFile {
    /// The names are the paths of the model's fields, such as `hidden.weight`; shapes are burn's: a
    /// `Linear` has `[inputs, outputs]`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), is_pytorch: false, key: None }
    }

    /// The names and shapes are those of a `state_dict` of PyTorch whose modules have the same names: a
    /// `Linear` has `[outputs, inputs]`, norms have `weight` and `bias`. Recurrent layers are not
    /// translated, as their gates lie otherwise.
    #[must_use]
    pub fn pytorch(self) -> Self {
        Self { is_pytorch: true, ..self }
    }

    /// Where in a file of `torch.save` the weights are, if they are not all of it: `model` in
    /// `torch.save({"epoch": 3, "model": model.state_dict()}, PATH)`.
    #[must_use]
    pub fn key(self, key: &str) -> Self {
        Self { key: Some(key.into()), ..self }
    }

    /// Writes all parameters and buffers of a model.
    ///
    /// # Errors
    ///
    /// The file cannot be written, or a tensor is of a type that the format has not.
    pub fn export<M: Module>(&self, model: &M) -> Result<()> {
        let mut tensors = vec![];
        for leaf in leaves(model) {
            let (bytes, shape, dtype) = (leaf.read)().into_parts();
            let (name, is_turned) = self.name(&leaf.path, &leaf.container, shape.len());
            let (mut shape, mut bytes) = (shape.to_vec(), bytes.to_vec());
            if is_turned {
                bytes = transposed(&bytes, shape[0], shape[1]);
                shape.swap(0, 1);
            }
            let dtype = theirs(dtype).ok_or_else(|| {
                format!("{name} is of {dtype:?}, which the format safetensors has not")
            })?;
            tensors.push((name, Written { dtype, shape, bytes }));
        }
        safetensors::serialize_to_file(tensors, None, &self.path)
            .map_err(|error| self.failed(&error))
    }

    /// The weights in `fresh`, a model of the same structure. Numbers are converted to the model's types.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or has not all tensors of the model, in their shapes, and no others.
    pub fn import<M: Module>(&self, fresh: M) -> Result<M> {
        let is_of_torch = self.is_of_torch().map_err(|error| self.failed(&error))?;
        let read = match is_of_torch {
            true => stored::torch(&self.path, self.key.as_deref()),
            false if self.key.is_some() => {
                Err("it is no file of torch.save, which has keys".into())
            }
            false => std::fs::read(&self.path)
                .map_err(crate::Error::from)
                .and_then(|bytes| stored::safetensors(&bytes)),
        };
        let mut file = read.map_err(|error| self.failed(&error))?;
        let named = Self { is_pytorch: self.is_pytorch || is_of_torch, ..self.clone() };
        // PyTorch counts the batches of a norm that keeps statistics; nothing of burn's does.
        file.retain(|name, _| !(named.is_pytorch && name.ends_with("num_batches_tracked")));
        let (mut entries, mut missing) = (vec![], vec![]);
        for leaf in leaves(&fresh) {
            let (name, is_turned) = named.name(&leaf.path, &leaf.container, leaf.shape.len());
            let Some(Stored { shape, dtype, read }) = file.remove(&name) else {
                missing.push(name);
                continue;
            };
            let mut expected = leaf.shape.clone();
            if is_turned {
                expected.swap(0, 1);
            }
            if shape != expected {
                let path = self.path.display();
                return Err(format!(
                    "{path}: {name} has shape {shape:?}, but must be {expected:?}"
                )
                .into());
            }
            let dtype = dtype.map_err(|dtype| {
                format!("{}: {name} is of {dtype}, which no model has", self.path.display())
            })?;
            let bytes = read().map_err(|error| self.failed(&error))?;
            let bytes = match is_turned {
                true => transposed(&bytes, expected[0], expected[1]),
                false => bytes,
            };
            let data =
                TensorData::from_bytes_vec(bytes, leaf.shape, dtype).convert_dtype(leaf.dtype);
            let (bytes, shape, dtype) = data.into_parts();
            entries.push((leaf.path.join("."), dtype, shape, Some(leaf.id.val()), bytes));
        }
        let unused: Vec<String> = file.into_keys().collect();
        if !missing.is_empty() || !unused.is_empty() {
            let list = |names: Vec<String>| match names.len() {
                0 => "nothing".to_owned(),
                _ => names.join(", "),
            };
            let (missing, unused) = (list(missing), list(unused));
            let path = self.path.display();
            return Err(format!(
                "{path} has not what the model has: missing {missing}; not of the model {unused}"
            )
            .into());
        }
        let packed = pack(entries, &BTreeMap::new(), BTreeMap::new())?;
        let record = ModuleRecord::from_bytes(to_burn(&packed))?;
        // Into the plain form first: BatchNorm's pending update would else be added to what is loaded.
        let _ = fresh.valid();
        Ok(fresh.try_load_record(record).map_err(|error| {
            format!("{}: the weights do not fit this model: {error}", self.path.display())
        })?)
    }

    /// The name in the file, and whether rows are columns there.
    fn name(&self, path: &[String], container: &str, rank: usize) -> (String, bool) {
        let own = path.join(".");
        if !self.is_pytorch {
            return (own, false);
        }
        let Some((leaf, parents)) = path.split_last() else { return (own, false) };
        let is_norm = container.ends_with("Norm");
        let leaf = match leaf.as_str() {
            "gamma" if is_norm => "weight",
            "beta" if is_norm => "bias",
            leaf => leaf,
        };
        let is_turned = container == "Struct:Linear" && leaf == "weight" && rank == 2;
        ([parents, &[leaf.to_owned()]].concat().join("."), is_turned)
    }

    /// Whether it is one of torch.save: looks at no more of it than tells.
    fn is_of_torch(&self) -> std::io::Result<bool> {
        let file = File::open(&self.path)?;
        let size = file.metadata()?.len();
        let mut head = vec![];
        file.take(stored::HEAD as u64).read_to_end(&mut head)?;
        Ok(stored::is_of_torch(&head, size))
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> crate::Error {
        format!("{}: {error}", self.path.display()).into()
    }
}

impl From<&Path> for WeightsFile {
    fn from(path: &Path) -> Self {
        Self::new(path)
    }
}

/// A tensor of a model.
struct Leaf {
    path: Vec<String>,
    /// What holds it, as burn says it: `Struct:Linear`.
    container: String,
    id: ParamId,
    shape: Vec<usize>,
    dtype: DType,
    read: Box<dyn FnOnce() -> TensorData>,
}

/// All tensors of a model, in the order of its fields.
fn leaves<M: Module>(model: &M) -> Vec<Leaf> {
    #[derive(Default)]
    struct Walk {
        path: Vec<String>,
        containers: Vec<String>,
        leaves: Vec<Leaf>,
    }
    impl Walk {
        fn add(
            &mut self,
            id: ParamId,
            shape: &Shape,
            dtype: DType,
            read: impl FnOnce() -> TensorData + 'static,
        ) {
            let (path, read) = (self.path.clone(), Box::new(read));
            let container = self.containers.last().cloned().unwrap_or_default();
            self.leaves.push(Leaf { path, container, id, shape: shape.to_vec(), dtype, read });
        }
    }
    impl ModuleVisitor for Walk {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.push(name.into());
            self.containers.push(container_type.into());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
            self.containers.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let tensor = param.transform_for_save().val();
            self.add(param.id, &tensor.shape(), tensor.dtype(), || tensor.into_data());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            let tensor = param.transform_for_save().val();
            self.add(param.id, &tensor.shape(), tensor.dtype(), || tensor.into_data());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            let tensor = param.transform_for_save().val();
            self.add(param.id, &tensor.shape(), tensor.dtype(), || tensor.into_data());
        }
    }
    // Brings BatchNorm's running statistics up to date, in place.
    let _ = model.valid();
    let mut walk = Walk::default();
    model.visit(&mut walk);
    walk.leaves
}

/// Rows as columns.
fn transposed(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    if bytes.is_empty() {
        return vec![];
    }
    let width = bytes.len() / (rows * columns);
    let element = |row: usize, column: usize| {
        let at = (row * columns + column) * width;
        &bytes[at..at + width]
    };
    (0..columns)
        .flat_map(|column| (0..rows).flat_map(move |row| element(row, column)))
        .copied()
        .collect()
}

/// A tensor on its way to a file.
struct Written {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for Written {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

const TYPES: [(DType, Dtype); 8] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::U8, Dtype::U8),
    (DType::Bool(burn::tensor::BoolStore::Native), Dtype::BOOL),
];

fn theirs(dtype: DType) -> Option<Dtype> {
    TYPES.iter().find(|it| it.0 == dtype).map(|it| it.1)
}

pub(super) fn ours(dtype: Dtype) -> Option<DType> {
    TYPES.iter().find(|it| it.1 == dtype).map(|it| it.0)
}

#[cfg(test)]
mod tests {
    use burn::nn::conv::{Conv2d, Conv2dConfig};
    use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
    use burn::tensor::Device;
    use safetensors::SafeTensors;

    use super::*;

    #[derive(Module, Debug)]
    struct Net {
        conv: Conv2d,
        norm: BatchNorm,
        output: Linear,
    }

    /// Draws a model's weights now: others may be drawing from the stream later.
    fn drawn<M: Module>(model: M) -> M {
        let _stream = crate::train::tests::alone_on_the_stream();
        crate::record::initialise(model)
    }

    fn net() -> Net {
        let device = Device::flex().autodiff();
        drawn(Net {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(&device),
            norm: BatchNormConfig::new(2).init(&device),
            output: LinearConfig::new(2, 3).init(&device),
        })
    }

    fn numbers(net: &Net) -> Vec<(Vec<String>, Vec<f32>)> {
        let values = |leaf: Leaf| (leaf.path, (leaf.read)().try_to_vec::<f32>().unwrap());
        leaves(net).into_iter().map(values).collect()
    }

    #[test]
    fn a_header_as_long_as_a_pickle_begins_is_one_of_safetensors() {
        let folder = tempfile::tempdir().unwrap();
        let file = WeightsFile::new(folder.path().join("x.safetensors"));
        let linear = || drawn(LinearConfig::new(784, 10).init(&Device::flex()));
        let (first, second): (Linear, Linear) = (linear(), linear());
        file.export(&first).unwrap();
        assert_eq!(std::fs::read(&file.path).unwrap()[..9], *b"\x80\0\0\0\0\0\0\0{");
        let read = file.import(second).unwrap();
        assert_eq!(read.weight.val().into_data(), first.weight.val().into_data());
    }

    #[test]
    fn weights_go_out_and_come_back_in_either_layout() {
        let folder = tempfile::tempdir().unwrap();
        for is_pytorch in [false, true] {
            let (first, second) = (net(), net());
            assert_ne!(numbers(&first), numbers(&second));
            let path = folder.path().join("x.safetensors");
            let file = WeightsFile { is_pytorch, ..WeightsFile::new(path) };
            file.export(&first).unwrap();
            let bytes = std::fs::read(&file.path).unwrap();
            let read = SafeTensors::deserialize(&bytes).unwrap();
            let shape = read.tensor("output.weight").unwrap().shape().to_vec();
            assert_eq!(shape, if is_pytorch { [3, 2] } else { [2, 3] });
            assert_eq!(read.names().contains(&"norm.gamma"), !is_pytorch);
            assert_eq!(numbers(&file.import(second).unwrap()), numbers(&first));
        }
    }

    #[test]
    fn rows_become_columns() {
        assert_eq!(
            transposed(&[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], 2, 3),
            [1, 1, 4, 4, 2, 2, 5, 5, 3, 3, 6, 6]
        );
    }

    #[test]
    fn a_file_of_another_model_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let device = Device::flex();
        let linear = |inputs| drawn(LinearConfig::new(inputs, 3).init(&device));
        WeightsFile::new(&path).export(&linear(2)).unwrap();
        let refused = |it: crate::Error| it.to_string().replace(path.to_str().unwrap(), "F");
        let error = refused(WeightsFile::new(&path).import(linear(4)).unwrap_err());
        assert_eq!(error, "F: weight has shape [2, 3], but must be [4, 3]");
        let error = refused(WeightsFile::new(&path).import(net()).unwrap_err());
        assert!(error.contains("missing conv.weight, conv.bias, norm.gamma"), "{error}");
        assert!(error.ends_with("not of the model bias, weight"), "{error}");
        let error = refused(WeightsFile::new(path.with_extension("y")).import(net()).unwrap_err());
        assert!(error.contains("No such file"), "{error}");
    }

    /// A file that PyTorch 2.15 wrote: number `i` of the n-th tensor is `n + i / 4`.
    fn of_torch(name: &str) -> WeightsFile {
        WeightsFile::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/").to_owned() + name)
    }

    #[cfg(feature = "pytorch")]
    #[test]
    fn files_of_torch_save_are_read_in_both_of_their_forms() {
        for file in [of_torch("net.pt"), of_torch("net-in-legacy.pt").key("model")] {
            let read = numbers(&file.import(net()).unwrap());
            let quarters =
                |first: f32, of: &[usize]| of.iter().map(|it| first + *it as f32 / 4.0).collect();
            let all = |num: usize| (0..num).collect::<Vec<_>>();
            let expected: Vec<(&str, Vec<f32>)> = vec![
                ("conv.weight", quarters(0.0, &all(18))),
                ("conv.bias", quarters(1.0, &all(2))),
                ("norm.gamma", quarters(2.0, &all(2))),
                ("norm.beta", quarters(3.0, &all(2))),
                ("norm.running_mean", quarters(4.0, &all(2))),
                ("norm.running_var", quarters(5.0, &all(2))),
                // Its rows are columns there.
                ("output.weight", quarters(7.0, &[0, 2, 4, 1, 3, 5])),
                ("output.bias", quarters(8.0, &all(3))),
            ];
            let read: Vec<_> =
                read.iter().map(|(path, values)| (path.join("."), values.clone())).collect();
            let expected: Vec<_> =
                expected.into_iter().map(|(path, values)| (path.to_owned(), values)).collect();
            assert_eq!(read, expected);
        }
        let error = of_torch("net.pt").key("modle").import(net()).unwrap_err().to_string();
        assert!(error.contains("net.pt: ") && error.contains("modle"), "{error}");
    }

    #[cfg(not(feature = "pytorch"))]
    #[test]
    fn a_file_of_torch_save_is_refused_with_what_reads_it() {
        for name in ["net.pt", "net-in-legacy.pt"] {
            let error = of_torch(name).import(net()).unwrap_err().to_string();
            assert!(
                error.contains("the feature `pytorch`") && error.contains("save_file"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_key_is_for_files_of_torch_save() {
        let folder = tempfile::tempdir().unwrap();
        let file = WeightsFile::new(folder.path().join("x.safetensors"));
        file.export(&net()).unwrap();
        let error = file.key("model").import(net()).unwrap_err().to_string();
        assert!(error.ends_with("it is no file of torch.save, which has keys"), "{error}");
    }
}
