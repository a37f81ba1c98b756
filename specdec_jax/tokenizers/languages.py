"""Languages of multilingual tokenizers: their codes, and where a model expects them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.tokenizers.special_tokens import Frame

# The codes of transformers' classes, in the order of their ids.
M2M_100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr "
    "ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk "
    "ur uz vi wo xh yi yo zh zu"
).split()
WMT21 = "en ha is ja cs ru zh de".split()
NLLB = (
    "ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab "
    "arb_Arab ars_Arab ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn "
    "bak_Cyrl bam_Latn ban_Latn bel_Cyrl bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt "
    "bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn cjk_Latn ckb_Arab crh_Latn cym_Latn "
    "dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn est_Latn eus_Latn "
    "ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn "
    "gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn "
    "hun_Latn hye_Armn ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn "
    "kac_Latn kam_Latn kan_Knda kas_Arab kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn "
    "kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn kon_Latn kor_Hang kmr_Latn lao_Laoo "
    "lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn lua_Latn lug_Latn "
    "luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn "
    "mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva "
    "nso_Latn nus_Latn nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn "
    "por_Latn prs_Arab pbt_Arab quy_Latn ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng "
    "scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn sna_Latn snd_Arab som_Latn sot_Latn "
    "spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn szl_Latn tam_Taml "
    "tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn "
    "tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab "
    "uzn_Latn vec_Latn vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans "
    "zho_Hant zul_Latn"
).split()
MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
).split()
MBART_50 = (  # after those of mBART
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF "
    "pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
).split()

_PLACES = {"source": ("before", "after", "none"), "target": ("first", "start", "input")}


class Languages(NamedTuple):
    """The languages of a tokenizer.

    Attributes:
      codes: id of each language, by the code that callers give.
      source: where an input has the id of its own language: "before" the text, "after" its EOS, or
        "none".
      target: what the id of the output's language is: the "first" token after the start token, the
        "start" token itself, or in the "input", before the text (Marian).
      default: code of an input's language where a call gives none; None: a call has to.
    """

    codes: Mapping[str, int]
    source: str
    target: str
    default: str | None = None

    @classmethod
    def read(cls, content: Any, size: int) -> "Languages":
        """Returns the languages that `written` describes; `size` is the number of ids.

        Raises:
          ValueError: something else.
        """
        fields = cls._fields
        sound = isinstance(content, dict) and set(content) == set(fields)
        sound = sound and isinstance(content["codes"], dict) and bool(content["codes"])
        sound = sound and all(content[name] in known for name, known in _PLACES.items())
        sound = sound and content["default"] in (None, *content["codes"])
        if not sound:
            raise mismatch_error("languages", quote_value(content), f"an object of {fields}")
        for code, i in content["codes"].items():
            if type(i) is not int or not 0 <= i < size:
                expected = f"an id below {size}"
                raise mismatch_error(f"languages: {quote_value(code)}", quote_value(i), expected)
        return cls(**content)

    def written(self) -> dict[str, Any]:
        """Returns what `read` reads, as JSON values."""
        return self._asdict() | {"codes": dict(self.codes)}

    def listed(self) -> str:
        """Returns what a message expects: one of the codes."""
        return f"one of {', '.join(self.codes)}"

    def find(self, name: str, code: str) -> int:
        """Returns the id of a language; `name` is the option's, for the message.

        Raises:
          ValueError: an unknown code.
        """
        if not isinstance(code, str) or code not in self.codes:
            raise mismatch_error(name, quote_value(code), self.listed())
        return self.codes[code]

    def needs_source(self, source: str | None) -> bool:
        """Returns whether an input lacks its language if a call gives `source`."""
        return self.source != "none" and source is None and self.default is None

    def make_frame(self, source: str | None, target: str | None, eos: int) -> Frame:
        """Returns what stands around an input in these languages.

        Raises:
          ValueError: an unknown code, or a source where inputs do not have it.
        """
        source = self.default if source is None else source
        if self.source == "none":
            if source is not None:
                expected = "none: this model takes a target_language alone"
                raise mismatch_error("source_language", quote_value(source), expected)
            before = () if target is None else (self.find("target_language", target),)
            return Frame(before if self.target == "input" else (), (eos,))
        if source is None:
            return Frame((), (eos,))
        code = self.find("source_language", source)
        return Frame((), (eos, code)) if self.source == "after" else Frame((code,), (eos,))

    def start_output(self, target: str | None) -> tuple[int, ...]:
        """Returns what an output in a language begins with after the start token."""
        if target is None:
            return ()
        code = self.find("target_language", target)
        return (code,) if self.target == "first" else ()


def choose_start_token(languages: Languages | None, target: str | None, start_token: int) -> int:
    """Returns what decoders are fed first: a language's token where that is the start token."""
    if languages is None or languages.target != "start" or target is None:
        return start_token
    return languages.find("target_language", target)
