//! Comparison of operators with outputs and gradients of PyTorch, from `scripts/record-kernels`.

use std::collections::BTreeMap;

use burn::nn::loss::CrossEntropyLoss;
use burn::prelude::*;
use burn::tensor::TensorData;
use burn::tensor::ops::{AttentionModuleOptions, AvgPoolOptions, ConvOptions, MaxPoolOptions};
use serde::Deserialize;

use crate::Activation;
use crate::testing::device;

/// Largest difference, relative to 1 + the size of the value.
const TOLERANCE: f32 = 2e-5;

#[derive(Deserialize)]
struct Record {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    operator: String,
    options: Options,
    inputs: BTreeMap<String, Values>,
    constants: BTreeMap<String, Values>,
    output: Values,
    /// Factor of each output in the loss.
    weights: Vec<Number>,
    gradients: BTreeMap<String, Vec<Number>>,
}

/// Options of all operators. Each has only some of them.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    activation: String,
    epsilon: f64,
    label_smoothing: Option<f32>,
    ignore_index: Option<usize>,
    causal: bool,
    scale: Option<f64>,
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: serde_json::Value,
    dilation: [usize; 2],
    groups: usize,
    count_include_pad: bool,
}

#[derive(Deserialize)]
struct Values {
    shape: Vec<usize>,
    values: Vec<Number>,
}

/// JSON has neither NaN nor infinities: they are strings.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f32),
    Other(String),
}

impl Number {
    fn value(&self) -> f32 {
        match self {
            Self::Finite(value) => *value,
            Self::Other(text) => text.parse().unwrap(),
        }
    }
}

fn floats(numbers: &[Number]) -> Vec<f32> {
    numbers.iter().map(Number::value).collect()
}

impl Values {
    fn tensor<const D: usize>(&self, device: &Device) -> Tensor<D> {
        Tensor::from_data(TensorData::new(floats(&self.values), self.shape.clone()), device)
    }
}

/// A case with the inputs on a device with autodiff.
struct Inputs<'a> {
    case: &'a Case,
    /// Flat leaves of the autodiff graph.
    leaves: BTreeMap<&'a str, Tensor<1>>,
}

impl<'a> Inputs<'a> {
    fn new(case: &'a Case) -> Self {
        let device = device().autodiff();
        let leaf = |(name, values): (&'a String, &'a Values)| {
            let flat = Values { shape: vec![values.values.len()], values: values.values.clone() };
            (name.as_str(), flat.tensor(&device).require_grad())
        };
        Self { case, leaves: case.inputs.iter().map(leaf).collect() }
    }

    fn optional<const D: usize>(&self, name: &str) -> Option<Tensor<D>> {
        let shape: [usize; D] = self.case.inputs.get(name)?.shape.clone().try_into().unwrap();
        Some(self.leaves[name].clone().reshape(shape))
    }

    fn float<const D: usize>(&self, name: &str) -> Tensor<D> {
        self.optional(name).unwrap()
    }

    fn constant<const D: usize>(&self, name: &str) -> Option<Tensor<D>> {
        Some(self.case.constants.get(name)?.tensor(&device().autodiff()))
    }

    fn loss(&self) -> CrossEntropyLoss {
        CrossEntropyLoss {
            pad_tokens: self.case.options.ignore_index.map(|class| vec![class]),
            weights: self.constant("class_weights"),
            smoothing: self.case.options.label_smoothing,
            logits: true,
        }
    }

    /// Applies the operator to an input of rank `D`.
    fn apply<const D: usize>(&self) -> Tensor<1> {
        let options = &self.case.options;
        flat::<D>(match self.case.operator.as_str() {
            "linear" => {
                let activation = match options.activation.as_str() {
                    "identity" => Activation::Identity,
                    "relu" => Activation::Relu,
                    "gelu" => Activation::Gelu,
                    other => panic!("unknown activation {other}"),
                };
                let (x, weight) = (self.float("x"), self.float("weight"));
                crate::linear(x, weight, self.optional("bias"), activation)
            }
            "layer_norm" => {
                let (x, gamma) = (self.float("x"), self.float("gamma"));
                crate::layer_norm(x, gamma, self.optional("beta"), options.epsilon)
            }
            "softmax" => crate::softmax(self.float("x"), D - 1),
            "log_softmax" => crate::log_softmax(self.float("x"), D - 1),
            "batch_norm_train" => {
                let (x, gamma, beta) = (self.float("x"), self.float("gamma"), self.float("beta"));
                crate::batch_norm_train(x, gamma, beta, options.epsilon).output
            }
            "batch_norm" => {
                let (x, gamma, beta) = (self.float("x"), self.float("gamma"), self.float("beta"));
                let [mean, variance] =
                    ["mean", "variance"].map(|name| self.constant(name).unwrap());
                crate::batch_norm(x, gamma, beta, mean, variance, options.epsilon)
            }
            other => panic!("unknown operator {other}"),
        })
    }

    /// Applies an operator on images or heads.
    fn apply_4d(&self) -> Option<Tensor<1>> {
        let options = &self.case.options;
        let padding = || serde_json::from_value::<[usize; 2]>(options.padding.clone()).unwrap();
        Some(flat::<4>(match self.case.operator.as_str() {
            "attention" => {
                let [query, key, value] = ["query", "key", "value"].map(|name| self.float(name));
                let hidden = self.constant("hidden").map(|mask: Tensor<4>| mask.bool());
                let options = AttentionModuleOptions {
                    scale: options.scale,
                    softcap: None,
                    is_causal: options.causal,
                };
                crate::attention(query, key, value, hidden, None, options)
            }
            "conv2d" => {
                let padding: [(usize, usize); 2] =
                    serde_json::from_value(options.padding.clone()).unwrap();
                let Options { stride, dilation, groups, .. } = *options;
                let options = ConvOptions::new_with_padding(stride, padding, dilation, groups);
                let (x, weight) = (self.float("x"), self.float("weight"));
                crate::conv2d(x, weight, self.optional("bias"), options, Activation::Identity)
            }
            "max_pool2d" => {
                let pool = MaxPoolOptions::new(options.kernel).with_stride(options.stride);
                let pool = pool.with_padding_pairs(padding().map(|padding| (padding, padding)));
                crate::max_pool2d(self.float("x"), pool.with_dilation(options.dilation))
            }
            "avg_pool2d" => {
                let pool = AvgPoolOptions::new(options.kernel).with_stride(options.stride);
                let pool = pool.with_padding_pairs(padding().map(|padding| (padding, padding)));
                let pool = pool.with_count_include_pad(options.count_include_pad);
                crate::avg_pool2d(self.float("x"), pool)
            }
            _ => return None,
        }))
    }

    /// Applies an operator that takes classes or indices.
    fn apply_with_indices(&self) -> Option<Tensor<1>> {
        let targets = || self.constant::<1>("targets").unwrap().int();
        Some(match self.case.operator.as_str() {
            "cross_entropy" => crate::cross_entropy(&self.loss(), self.float("logits"), targets()),
            "cross_entropy_of_samples" => {
                crate::cross_entropy_of_samples(&self.loss(), self.float("logits"), targets())
            }
            "weighted_cross_entropy" => {
                let weights = self.float("sample_weights");
                let logits = self.float("logits");
                crate::weighted_cross_entropy(&self.loss(), logits, targets(), weights)
            }
            "embedding" => {
                let indices = self.constant::<2>("indices").unwrap().int();
                flat(crate::embedding(self.float("weight"), indices))
            }
            _ => return None,
        })
    }
}

fn flat<const D: usize>(y: Tensor<D>) -> Tensor<1> {
    let num = y.dims().iter().product::<usize>();
    y.reshape([num])
}

#[track_caller]
fn assert_close(name: &str, ours: Tensor<1>, expected: &[Number]) {
    let ours: Vec<f32> = ours.into_data().try_to_vec().unwrap();
    assert_eq!(ours.len(), expected.len(), "{name}");
    for (index, (ours, expected)) in ours.iter().zip(floats(expected)).enumerate() {
        let is_same = *ours == expected || (ours.is_nan() && expected.is_nan());
        let is_close = (ours - expected).abs() <= TOLERANCE * (1.0 + expected.abs());
        assert!(is_same || is_close, "{name}: {index} is {ours} instead of {expected}");
    }
}

#[test]
fn outputs_and_gradients_match_pytorch() {
    let record: Record = serde_json::from_str(include_str!("pytorch.json")).unwrap();
    for (number, case) in record.cases.iter().enumerate() {
        let name = format!("case {number}, {} with {:?}", case.operator, case.options);
        let inputs = Inputs::new(case);
        let y = inputs.apply_4d().or_else(|| inputs.apply_with_indices());
        let y = y.unwrap_or_else(|| match case.inputs["x"].shape.len() {
            2 => inputs.apply::<2>(),
            3 => inputs.apply::<3>(),
            rank => {
                assert_eq!(rank, 4, "{name}");
                inputs.apply::<4>()
            }
        });
        assert_close(&format!("{name}: output"), y.clone(), &case.output.values);
        let weights = TensorData::from(floats(&case.weights).as_slice());
        let loss = (y * Tensor::from_data(weights, &device().autodiff())).sum();
        let gradients = loss.backward();
        for (input, expected) in &case.gradients {
            let gradient = inputs.leaves[input.as_str()].grad(&gradients).unwrap();
            assert_close(&format!("{name}: gradient of {input}"), gradient, expected);
        }
    }
}
